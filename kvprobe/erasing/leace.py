"""LEACE: of all affine maps after which no linear probe can read a concept, the one that changes the features least.

Least-squares concept erasure (Belrose et al. 2023, arXiv 2306.03819): in whitened coordinates, the directions in which
features and labels covary are projected away. What is left has no covariance with the labels, so the best linear probe
under any convex loss is the constant one; and the mean squared change is the smallest that achieves this.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.erasing.subspace import Eraser
from kvprobe.erasing.whitening import Whitening
from kvprobe.errors import UserError
from kvprobe.probing.gram import Moments, one_hot_answers
from kvprobe.probing.linear import check_features

_NEGLIGIBLE = 1e-4
"""Covariance of a label with features of unit variance, below which it counts as rounding."""


@checked_arguments
def leace(
    features: Float[Tensor, "*sites samples dim"],
    labels: Int[Tensor, "samples"] | Int[Tensor, "targets samples"],
    classes: int,
) -> Eraser:
    """The eraser of all targets together, for each site of a batch (layer × K or V × head, say).

    Where each slot is a sample, the concept is also erased from the mean over a conversation's slots, which is linear
    in them.

    Args:
        labels: class number of each sample, for each target.
        classes: of every target.

    Raises:
        UserError: labels out of range or not as many as samples, fewer than two samples, or features that are not
            finite.
    """
    labels = torch.atleast_2d(labels)
    if labels.shape[1] != features.shape[-2] or labels.shape[1] < 2:
        raise UserError(
            f"There are {features.shape[-2]} samples with {labels.shape[1]} labels; an eraser needs a label for each "
            "of at least two samples."
        )
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UserError(f"Labels must lie in 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}.")
    sites = features.shape[:-2]
    flat = features.reshape(-1, *features.shape[-2:]).double()
    check_features(flat)
    eraser = leace_of(Moments.of(flat, one_hot_answers(labels, classes, flat.dtype)))
    tensors = (eraser.read, eraser.write, eraser.mean, eraser.covariance)
    return Eraser(*(tensor.reshape(*sites, *tensor.shape[1:]) for tensor in tensors))


def leace_of(moments: Moments, shrinkage: float = 0.0, noise: Float[Tensor, "sites"] | None = None) -> Eraser:
    """The eraser from what features and answers, as one-hot columns or any numbers, have in common; see `FoldMoments`.

    Args:
        shrinkage: share of the covariance that is replaced by a sphere of the same trace. The labels are erased as
            completely with it as without. With few samples, some directions vary little by chance; shrinkage keeps them
            from being treated as directions in which features never vary.
        noise: covariance of answers with whitened features at each site; directions that covary no more are left.
    """
    whitening, covariance = _whitened(moments, shrinkage)
    shared = whitening.whiten @ (moments.cross.double() / moments.count)
    directions, strength, _ = torch.linalg.svd(shared, full_matrices=False)
    informative = strength > (_NEGLIGIBLE if noise is None else noise.clamp(min=_NEGLIGIBLE)[:, None])
    rank = max(1, int(informative.sum(1).max()))
    basis = directions[:, :, :rank] * informative[:, None, :rank]
    return Eraser(
        (whitening.whiten @ basis).float(),
        (basis.mT @ whitening.unwhiten).float(),
        moments.features.float(),
        covariance.float(),
    )


def leace_beyond_chance(
    features: Float[Tensor, "sites samples dim"],
    answers: Float[Tensor, "samples outputs"],
    orders: Sequence[Int[Tensor, "samples"]],
) -> Eraser:
    """The eraser of the directions that covary more with the answers than any direction does with shuffled ones.

    Args:
        answers: one-hot columns or any numbers.
        orders: permutations of the samples, by which answers are shuffled.
    """
    features = features.double()
    moments = Moments.of(features, answers)
    centred = (features - features.mean(1, keepdim=True)).mT
    shuffled = torch.stack([centred @ answers[order] for order in orders])
    whitening, _ = _whitened(moments, 0.0)
    noise = torch.linalg.svdvals(whitening.whiten @ (shuffled / moments.count))[:, :, 0].amax(0)
    return leace_of(moments, noise=noise)


def _whitened(moments: Moments, shrinkage: float) -> tuple[Whitening, Float[Tensor, "sites dim dim"]]:
    """Whitening of features, and their covariance."""
    covariance = moments.gram.double() / moments.count
    sphere = covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(covariance.shape[1]).to(covariance)
    covariance = (1 - shrinkage) * covariance + shrinkage * sphere
    return Whitening.of(covariance, moments.features), covariance
