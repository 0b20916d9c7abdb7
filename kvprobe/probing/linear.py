"""What every linear probe is made of: weights on centred features, and checks of its input."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError


@dataclass(frozen=True)
class LinearProbes:
    """Weights of a batch of probes, each for all targets: a class scores `(features - mean) @ weights + intercept`.

    The mean is kept apart from the intercept, since large means would cancel in it.
    """

    mean: Float[Tensor, "probes dim"]
    weights: Float[Tensor, "probes dim outputs"]
    intercept: Float[Tensor, "probes outputs"]
    classes: int

    def scores(self, features: Float[Tensor, "probes samples dim"]) -> Float[Tensor, "probes targets samples classes"]:
        """The score of each class, in the precision of `features`."""
        mean, weights, intercept = (tensor.to(features.dtype) for tensor in (self.mean, self.weights, self.intercept))
        scores = torch.baddbmm(intercept[:, None], features - mean[:, None], weights)
        return scores.unflatten(-1, (-1, self.classes)).transpose(1, 2)


def log_frequency(labels: Int[Tensor, "targets samples"], classes: int) -> Float[Tensor, "targets classes"]:
    """Log of each class's share of the samples; a class that was not seen counts as half a sample, so that all are
    finite."""
    counts = torch.nn.functional.one_hot(labels, classes).sum(1).clamp(min=0.5)
    return (counts / counts.sum(1, keepdim=True)).log()


def check_problem(
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    contexts: Sequence[int] | Int[np.ndarray, "samples"] | None = None,
) -> None:
    """Refuse labels and folds that no probe can be fitted to.

    Args:
        contexts: number of each sample's context, where no context may be in two folds.

    Raises:
        UserError: labels out of range or of one class, fewer samples than classes, fewer than three folds, an empty
            fold, or a context in two folds.
    """
    samples, count = labels.shape[1], int(folds.max()) + 1
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UserError(f"Labels must lie in 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}.")
    if samples < classes:
        raise UserError(f"A probe of {classes} classes needs at least {classes} samples; there are {samples}.")
    for target, row in enumerate(labels):
        if len(row.unique()) == 1:
            raise UserError(
                f"Target {target} has the one class {int(row[0])} in all {samples} samples; a probe needs at least two."
            )
    if count < 3:
        raise UserError(f"Probes need at least 3 folds (train, inner, test); got {count}.")
    empty = torch.nonzero(torch.bincount(folds, minlength=count) == 0)[:, 0].tolist()
    if empty:
        raise UserError(f"No sample is in fold {empty[0]}; number the folds from 0 and leave none empty.")
    if contexts is not None:
        numbers = torch.as_tensor(np.asarray(contexts), device=folds.device)
        pairs = torch.stack([numbers, folds]).unique(dim=1)[0]
        context, folds_of = pairs.unique(return_counts=True)
        if bool((folds_of > 1).any()):
            raise UserError(
                f"Context {int(context[folds_of > 1][0])} is in more than one fold, so its samples would be trained "
                "and tested on; give all samples of a context the same fold."
            )


def check_features(features: Float[Tensor, "probes samples dim"]) -> None:
    """Refuse features that are not finite.

    Raises:
        UserError: there is NaN or infinity in them.
    """
    if not bool(torch.isfinite(features).all()):
        raise UserError("Features hold NaN or infinity; a probe needs finite numbers.")


def check_variation(
    features: Float[Tensor, "probes samples dim"], floor: Float[Tensor, "probes"], first: int = 0
) -> None:
    """Refuse a probe whose features are all constant.

    Args:
        floor: standard deviation up to which a feature is constant but for round-off.
        first: number of the first probe.

    Raises:
        UserError: no feature of some probe varies by more than its floor.
    """
    still = torch.nonzero(features.std(1, correction=0).amax(1) <= floor)[:, 0].tolist()
    if still:
        raise UserError(
            f"All features of probe {first + still[0]} are constant over the samples, so there is nothing to read; "
            "drop the probe, or pass may_be_constant=True if it is a floor or a control."
        )
