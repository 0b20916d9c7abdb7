"""The probe that gets published: trained on all samples, with probabilities fitted to conversations that it was not
trained on.

Penalty and temperature come from out-of-fold evidence with whole contexts held out. A probe that only knows its own
contexts therefore stays near the class frequencies, whatever it scores on conversations that it has seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.calibration import fit_temperature
from kvprobe.probing.gram import one_hot_answers
from kvprobe.probing.linear import LinearProbes, check_features, check_problem, log_frequency
from kvprobe.probing.ridge import PENALTIES, VARIANCE_FLOOR
from kvprobe.probing.splits import fold_numbers


@dataclass(frozen=True)
class FittedProbe:
    """A probe with what was needed to fit it.

    Attributes:
        probes: one probe; softmax of its scores is the probability of each class.
        deviation: of each feature over the training samples, about the probe's mean; infinite where the feature is
            constant up to round-off.
        penalty: of ridge regression, per sample.
        temperature: the divisor of the weights, per target.
        distances: of each sample from the samples of other folds, see `distance`.
        right: whether the most likely class of each sample, by probes of other contexts, is the true one.
        gains: bits by which this class is more likely than in the sample's restart; None where there is no restart.
    """

    probes: LinearProbes
    deviation: Float[Tensor, "dim"]
    penalty: float
    temperature: Float[Tensor, "targets"]
    distances: Float[Tensor, "samples"]
    right: Bool[Tensor, "targets samples"]
    gains: Float[Tensor, "targets samples"] | None


def fitted_probe(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "targets samples"],
    contexts: Int[np.ndarray, "samples"],
    classes: int,
    *,
    restart: Float[Tensor, "samples dim"] | None = None,
    through_origin: bool = False,
    folds: int = 5,
    penalties: Sequence[float] = PENALTIES,
    rng: np.random.Generator,
) -> FittedProbe:
    """Ridge regression on one-hot labels, as probabilities softmax(log frequency + evidence / temperature).

    Args:
        labels: class number of each sample, per target.
        contexts: number of the context of each sample; whole ones are held out.
        restart: features of the same slots computed again without the hidden text.
        through_origin: for features that are differences, where zero carries no information: the probe gives the class
            frequencies at zero. Otherwise it gives them at the training mean.
        rng: of the folds.

    Raises:
        UserError: fewer contexts than folds, fewer than three folds, labels out of range or of one class, fewer samples
            than classes, features that are constant or not finite.
    """
    features = features.float()
    fold = torch.from_numpy(fold_numbers("leave-context-out", contexts, folds, rng)).to(features.device)
    check_problem(labels, fold, classes, contexts)
    check_features(features[None])
    floor = VARIANCE_FLOOR * features.square().mean().sqrt()
    if not bool((features.std(0, correction=0) > floor).any()):
        raise UserError(
            "All features are constant over the samples, so there is nothing to read; fit a probe of another site."
        )

    def fit(rows: Bool[Tensor, "samples"], penalties: Sequence[float]) -> _RidgeFit:
        return _ridge(features[rows], labels[:, rows], classes, penalties, floor, through_origin)

    prior = log_frequency(labels, classes)[:, None].to(features.dtype)
    both = torch.stack([features, features if restart is None else restart.float()])
    evidence = features.new_empty(len(penalties), 2, *labels.shape, classes)
    distances = features.new_empty(len(features))
    for number in range(folds):
        test = fold == number
        trained = fit(~test, penalties)
        scores = (both[:, test] - trained.centre) @ trained.weights[:, None]
        evidence[:, :, :, test] = scores.unflatten(-1, (-1, classes)).transpose(2, 3)
        distances[test] = distance(features[test], trained.centre, trained.deviation)

    fits = []
    for penalty, of_penalty in zip(penalties, evidence, strict=True):
        temperature = fit_temperature(of_penalty[:1], prior, labels, torch.zeros_like(fold))[0, :, 0]
        posterior = (prior + of_penalty / temperature[:, None, None]).log_softmax(-1)
        fits.append((float(posterior[0].gather(-1, labels[..., None]).mean()), penalty, temperature, posterior))
    # Of equally good penalties the largest.
    _, penalty, temperature, (retained, restarted) = max(fits, key=lambda fit: fit[:2])
    best = retained.argmax(-1)
    gains = (retained - restarted).gather(-1, best[..., None])[..., 0] / log(2)

    final = fit(torch.ones_like(fold, dtype=torch.bool), [penalty])
    cooled = final.weights[0].unflatten(1, (-1, classes)) / temperature[:, None]
    probes = LinearProbes(final.centre[None], cooled.flatten(1)[None], prior.reshape(1, -1), classes)
    right = best.eq(labels)
    return FittedProbe(
        probes, final.deviation, penalty, temperature, distances, right, None if restart is None else gains
    )


def distance(
    features: Float[Tensor, "*rows dim"], mean: Float[Tensor, "dim"], deviation: Float[Tensor, "dim"]
) -> Float[Tensor, "*rows"]:
    """How far features lie from a probe's mean: root mean square, over the features that vary, of the difference in
    deviations about it. It is about 1 for samples like those that gave mean and deviation."""
    return ((features - mean) / deviation).square().sum(-1).div(deviation.isfinite().sum()).sqrt()


@dataclass(frozen=True)
class _RidgeFit:
    """Weights on features less their centre, and the features' deviations about it."""

    centre: Float[Tensor, "dim"]
    deviation: Float[Tensor, "dim"]
    weights: Float[Tensor, "penalties dim outputs"]


def _ridge(
    features: Float[Tensor, "samples dim"],
    labels: Int[Tensor, "targets samples"],
    classes: int,
    penalties: Sequence[float],
    floor: Float[Tensor, ""],
    through_origin: bool,
) -> _RidgeFit:
    """Regression of one-hot labels, less their shares, on features in units of their deviations, at each penalty."""
    centre = torch.zeros_like(features[0]) if through_origin else features.mean(0)
    deviation = (features - centre).square().mean(0).sqrt()
    deviation = torch.where(deviation > floor, deviation, torch.inf)
    scaled = ((features - centre) / deviation).double()
    answers = one_hot_answers(labels, classes, torch.float64)
    gram, cross = scaled.T @ scaled, scaled.T @ (answers - answers.mean(0))
    solved = []
    for penalty in penalties:
        stiff = gram + penalty * len(features) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solved.append(torch.cholesky_solve(cross, torch.linalg.cholesky(stiff)) / deviation[:, None])
    return _RidgeFit(centre, deviation, torch.stack(solved).float())
