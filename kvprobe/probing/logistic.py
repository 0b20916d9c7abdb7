"""Thousands of multi-class logistic probes at once.

Each probe and target minimises mean cross-entropy + penalty/2 · ‖weights‖² on standardised features, the intercept free:
scikit-learn's `LogisticRegression` of three classes or more with `C = 1 / (penalty · samples)`. The features are turned into
the eigenvectors of their Gram matrix, which leaves the penalty as it is and makes the work of `kvprobe.probing.lbfgs`
short. The penalties are a path, each started where the larger one before it ended.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.gram import Moments, one_hot_answers, principal_axes
from kvprobe.probing.lbfgs import SoftmaxLoss, minimised
from kvprobe.probing.linear import LinearProbes, OutOfFold, log_frequency
from kvprobe.probing.ridge import VARIANCE_FLOOR

LOGISTIC_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Penalties on squared weights, beside the mean cross-entropy in nats, on features of unit variance."""


def logistic_path(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    classes: int,
    penalties: Sequence[float] = LOGISTIC_PENALTIES,
    size: Float[Tensor, "probes"] | None = None,
    tolerance: float = 1e-4,
) -> Iterator[LinearProbes]:
    """Probes of every target at each penalty in turn, which should fall.

    Args:
        size: root mean square of what the probes read before any centring; that of `features` by default.
        tolerance: largest entry of the gradient at which a probe has converged.
    """
    training = _Training(features, labels, classes, _floor(features, size))
    weights = training.frequencies()
    for penalty in penalties:
        weights = training.fit(weights, torch.full_like(weights[:, 0, :, 0], penalty), tolerance)
        yield training.probes(weights)


def logistic_evidence(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalties: Sequence[float] = LOGISTIC_PENALTIES,
    size: Float[Tensor, "probes"] | None = None,
    tolerance: float = 1e-3,
) -> OutOfFold:
    """Cross-validated logistic classification of every target from every probe's features.

    Each probe and target takes the penalty of least cross-entropy on the inner fold; the path ends for all when no
    cross-entropy has fallen at two penalties in a row.
    """
    count, floor = int(folds.max()) + 1, _floor(features, size)
    shape = (len(features), *labels.shape)
    predicted = torch.empty(shape, dtype=torch.long, device=features.device)
    evidence, inner_evidence = (features.new_empty(*shape, classes) for _ in range(2))
    inner_accuracy = features.new_empty(len(features), count)
    penalty = features.new_empty(*shape[:2], count)
    for fold in range(count):
        inner = (fold + 1) % count
        train, held, test = (
            torch.nonzero(mask)[:, 0] for mask in ((folds != fold) & (folds != inner), folds == inner, folds == fold)
        )
        best = _best_on(features, labels, train, held, classes, penalties, floor, tolerance)
        prior = log_frequency(labels[:, train], classes)[:, None]
        inner_evidence[:, :, held] = best.scores - prior
        inner_accuracy[:, fold] = best.scores.argmax(-1).eq(labels[:, held]).to(features.dtype).mean((1, 2))
        penalty[:, :, fold] = best.penalty
        both = torch.nonzero(folds != fold)[:, 0]
        training = _Training(features[:, both], labels[:, both], classes, floor)
        scores = training.probes(training.fit(training.start(best.probes), best.penalty, tolerance)).scores(
            features[:, test]
        )
        predicted[:, :, test] = scores.argmax(-1)
        evidence[:, :, test] = scores - log_frequency(labels[:, both], classes)[:, None]
    return OutOfFold(predicted, evidence, inner_evidence, inner_accuracy, penalty)


@dataclass(frozen=True)
class _Best:
    """The probes that did best on the inner fold, what they score there, and at which penalty."""

    probes: LinearProbes
    scores: Float[Tensor, "probes targets held classes"]
    penalty: Float[Tensor, "probes targets"]


def _best_on(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    train: Int[Tensor, "train"],
    held: Int[Tensor, "held"],
    classes: int,
    penalties: Sequence[float],
    floor: Float[Tensor, "probes"],
    tolerance: float,
) -> _Best:
    training = _Training(features[:, train], labels[:, train], classes, floor)
    weights = training.frequencies()
    seen, answers = features[:, held], labels[:, held].expand(len(features), -1, -1)[..., None]
    best, idle = None, 0
    least = torch.full_like(weights[:, 0, :, 0], torch.inf)
    for penalty in sorted(penalties, reverse=True):
        each = torch.full_like(least, penalty)
        weights = training.fit(weights, each, tolerance)
        probes = training.probes(weights)
        scores = probes.scores(seen)
        loss = -scores.log_softmax(-1).gather(-1, answers)[..., 0].mean(-1)
        better = loss < least
        least = torch.where(better, loss, least)
        if best is None:
            best = _Best(probes, scores, each)
            continue
        wide = better.repeat_interleave(classes, 1)
        kept = LinearProbes(
            probes.mean,
            torch.where(wide[:, None], probes.weights, best.probes.weights),
            torch.where(wide, probes.intercept, best.probes.intercept),
            classes,
        )
        scores = torch.where(better[..., None, None], scores, best.scores)
        best = _Best(kept, scores, torch.where(better, each, best.penalty))
        idle = 0 if bool(better.any()) else idle + 1
        if idle == 2:
            break
    assert best is not None
    return best


def _floor(
    features: Float[Tensor, "probes samples dim"], size: Float[Tensor, "probes"] | None
) -> Float[Tensor, "probes"]:
    return VARIANCE_FLOOR * (features.square().mean((1, 2)).sqrt() if size is None else size)


class _Training:
    """A training set in the principal axes of its standardised features, with a last axis of ones for the intercept."""

    def __init__(
        self,
        features: Float[Tensor, "probes samples dim"],
        labels: Int[Tensor, "targets samples"],
        classes: int,
        floor: Float[Tensor, "probes"],
    ) -> None:
        moments = Moments.of(features, one_hot_answers(labels, classes, features.dtype))
        count = moments.count
        deviation = (moments.gram.diagonal(dim1=1, dim2=2) / count).sqrt()
        scale = torch.where(deviation > floor[:, None], 1 / deviation, 0.0)
        correlation = moments.gram / count * scale[:, :, None] * scale[:, None, :]
        eigenvalues, axes = principal_axes(correlation)
        self.classes, self.mean = classes, moments.features
        self.turn = scale[:, :, None] * axes
        self.back = (deviation[:, :, None] * axes).mT
        turned = self.turn.mT @ (features - self.mean[:, None]).mT
        ones = torch.ones_like(turned[:, :1])
        points = torch.cat([turned, ones], 1)
        sums = torch.cat([self.turn.mT @ moments.cross / count, moments.answers.expand(len(features), 1, -1)], 1)
        variance = torch.cat([eigenvalues.clamp(min=0), ones[:, :, 0]], 1)
        self.shares = log_frequency(labels, classes)
        self.loss = SoftmaxLoss(points, sums.unflatten(2, (-1, classes)), variance)

    def frequencies(self) -> Float[Tensor, "probes axes targets classes"]:
        """Weights of nought, and the intercepts that are best with them."""
        weights = torch.zeros_like(self.loss.sums)
        weights[:, -1] = self.shares
        return weights

    def start(self, probes: LinearProbes) -> Float[Tensor, "probes axes targets classes"]:
        """The weights of probes that were trained on other samples, in these axes."""
        moved = torch.baddbmm(probes.intercept[:, None], (self.mean - probes.mean)[:, None], probes.weights)
        return torch.cat([self.back @ probes.weights, moved], 1).unflatten(2, (-1, self.classes))

    def probes(self, weights: Float[Tensor, "probes axes targets classes"]) -> LinearProbes:
        """The weights in the features' own units."""
        flat = weights.flatten(2)
        return LinearProbes(self.mean, self.turn @ flat[:, :-1], flat[:, -1], self.classes)

    def fit(
        self,
        weights: Float[Tensor, "probes axes targets classes"],
        penalty: Float[Tensor, "probes targets"],
        tolerance: float,
    ) -> Float[Tensor, "probes axes targets classes"]:
        """The weights of least penalised cross-entropy, from some to start at."""
        return minimised(self.loss, weights, penalty, tolerance)
