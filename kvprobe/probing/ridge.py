"""Thousands of multi-class ridge probes in one batched solve.

One-hot labels are regressed on standardised features; the largest score wins. All probes (layers, K or V,
read-outs) and all targets (digits) are solved together, from moments of each fold (`kvprobe.probing.gram`), so
cross-validation costs no further pass over the features. The penalty is chosen on an inner fold; the test fold is
touched once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.gram import FoldMoments, Moments, one_hot_answers
from kvprobe.probing.linear import LinearProbes, check_features

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties per training sample, on features of unit variance."""

VARIANCE_FLOOR = 1e-5
"""Features that vary less than this, relative to the size of what the probe reads, are constant but for round-off."""


@dataclass(frozen=True)
class RidgeResult:
    """Out-of-fold predictions of a batch of probes; fold f takes fold f + 1 as its inner fold.

    Attributes:
        predicted: class of each sample, by probes that were not trained on it.
        inner_accuracy: accuracy on the inner fold at the chosen penalty, by outer fold. Nothing else may be used to
            choose between probes.
        penalty: the chosen penalty, by outer fold.
    """

    predicted: Int[Tensor, "probes targets samples"]
    inner_accuracy: Float[Tensor, "probes folds"]
    penalty: Float[Tensor, "probes folds"]


@dataclass(frozen=True)
class RidgeEvidence(RidgeResult):
    """The same predictions with what the probes say about every class.

    Attributes:
        evidence: what the features add to each class's share of the training set, up to a temperature.
        inner_evidence: the same for each sample's fold as inner fold, by the probe of the fold before it at its chosen
            penalty.
    """

    evidence: Float[Tensor, "probes targets samples classes"]
    inner_evidence: Float[Tensor, "probes targets samples classes"]


def ridge_probes(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    size: Float[Tensor, "probes"] | None = None,
) -> RidgeResult:
    """Cross-validated ridge classification of every target from every probe's features.

    Args:
        labels: class number of each sample, per target.
        folds: outer test fold of each sample; fold f takes fold f + 1 as its inner fold.
        size: root mean square of what the probes read before any centring, against which `VARIANCE_FLOOR` is
            measured; that of `features` by default.

    Raises:
        UserError: fewer than three folds, labels out of range, or features that are not finite.
    """
    predicted = torch.empty(len(features), *labels.shape, dtype=torch.long, device=features.device)
    inner_accuracy, chosen_penalty = [], []
    for fitted in fitted_by_fold(features, labels, folds, classes, penalties, size):
        inner_accuracy.append(fitted.inner_accuracy)
        chosen_penalty.append(fitted.penalty)
        predicted[:, :, fitted.test] = fitted.probes.scores(features[:, fitted.test]).argmax(-1)
    return RidgeResult(predicted, torch.stack(inner_accuracy, 1), torch.stack(chosen_penalty, 1))


def ridge_evidence(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    *,
    size: Float[Tensor, "probes"] | None = None,
) -> RidgeEvidence:
    """The same probes with what they say about every class; arguments and errors are those of `ridge_probes`."""
    shape = (len(features), *labels.shape)
    predicted = torch.empty(shape, dtype=torch.long, device=features.device)
    evidence, inner_evidence = (features.new_empty(*shape, classes) for _ in range(2))
    inner_accuracy, chosen_penalty = [], []
    for fitted in fitted_by_fold(features, labels, folds, classes, PENALTIES, size):
        inner_accuracy.append(fitted.inner_accuracy)
        chosen_penalty.append(fitted.penalty)
        predicted[:, :, fitted.test] = fitted.probes.scores(features[:, fitted.test]).argmax(-1)
        evidence[:, :, fitted.test] = _above_share(fitted.probes, features[:, fitted.test])
        inner_evidence[:, :, fitted.inner] = _above_share(fitted.inner_probes, features[:, fitted.inner])
    return RidgeEvidence(
        predicted, torch.stack(inner_accuracy, 1), torch.stack(chosen_penalty, 1), evidence, inner_evidence
    )


def streamed_ridge(
    batches: Callable[[], Iterable[Float[Tensor, "probes batch dim"]]],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    size: Float[Tensor, "probes"] | None = None,
) -> RidgeResult:
    """`ridge_probes` on features that do not fit in memory, in three passes: moments, penalties, predictions.

    Args:
        batches: starts a pass over the features, some samples at a time, in the order of `labels`.

    Raises:
        UserError: as `ridge_probes`, or a pass that gives another number of samples than there are labels.
    """
    count = _checked(labels, folds, classes)
    moments = FoldMoments(count, classes)
    for rows, batch in _rows(batches, len(folds)):
        moments.update(batch, labels[:, rows], folds[rows])
    whole = moments.of(range(count))
    floor = (VARIANCE_FLOOR * (whole.size if size is None else size))[:, None]
    probes, dim = whole.features.shape
    # The penalties of `ridge_probes` on features of the usual precision, so that both choose from the same.
    grid = _grid(penalties, dim, torch.float32).to(whole.features)

    hits = torch.zeros(len(grid), probes, count, dtype=torch.float64, device=grid.device)
    paths = []
    for fold in range(count):
        trained = _Ridge(
            moments.of([other for other in range(count) if other not in (fold, (fold + 1) % count)]), floor
        )
        paths.append([trained.at(penalty.expand(probes), classes) for penalty in grid])
    for rows, batch in _rows(batches, len(folds)):
        for fold, path in enumerate(paths):
            inner = torch.nonzero(folds[rows] == (fold + 1) % count)[:, 0]
            for index, candidate in enumerate(path):
                right = candidate.scores(batch[:, inner]).argmax(-1).eq(labels[:, rows][:, inner])
                hits[index, :, fold] += right.sum((1, 2))
    held = torch.bincount(folds, minlength=count).roll(-1) * len(labels)
    accuracy, penalty = zip(*(_chosen((hits / held)[:, :, fold], grid) for fold in range(count)), strict=True)

    final = [
        _Ridge(moments.of([other for other in range(count) if other != fold]), floor).at(penalty[fold], classes)
        for fold in range(count)
    ]
    predicted = torch.empty(probes, *labels.shape, dtype=torch.long, device=grid.device)
    for rows, batch in _rows(batches, len(folds)):
        for fold, trained in enumerate(final):
            test = torch.nonzero(folds[rows] == fold)[:, 0]
            predicted[:, :, rows.start + test] = trained.scores(batch[:, test]).argmax(-1)
    return RidgeResult(predicted, torch.stack(accuracy, 1).float(), torch.stack(penalty, 1).float())


@dataclass(frozen=True)
class FittedFold:
    """Probes of one outer fold: those that chose the penalty, and those trained on the inner fold too."""

    test: Int[Tensor, "held"]
    inner: Int[Tensor, "inner_held"]
    inner_probes: LinearProbes
    probes: LinearProbes
    inner_accuracy: Float[Tensor, "probes"]
    penalty: Float[Tensor, "probes"]


def fitted_by_fold(
    features: Float[Tensor, "probes samples dim"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalties: Sequence[float],
    size: Float[Tensor, "probes"] | None,
    only: Sequence[int] | None = None,
) -> Iterator[FittedFold]:
    """The probes of each outer fold in turn, or of these only."""
    count = _checked(labels, folds, classes)
    check_features(features)
    if size is None:
        size = features.square().mean((1, 2)).sqrt()
    floor = (VARIANCE_FLOOR * size)[:, None]
    answers = one_hot_answers(labels, classes, features.dtype)
    members = [torch.nonzero(folds == fold)[:, 0] for fold in range(count)]
    # Where features outnumber samples, samples are the smaller of the two systems of equations.
    few = features.shape[2] > features.shape[1]
    parts = [] if few else [Moments.of(features[:, rows], answers[rows]) for rows in members]

    def trained_on(training_folds: Sequence[int]) -> _Ridge | _KernelRidge:
        if few:
            rows = torch.cat([members[other] for other in training_folds])
            return _KernelRidge(features[:, rows], answers[rows], floor)
        return _Ridge(Moments.merged([parts[other] for other in training_folds]), floor)

    grid = _grid(penalties, features.shape[2], features.dtype).to(features.device)
    for fold in range(count) if only is None else only:
        inner = (fold + 1) % count
        trained = trained_on([other for other in range(count) if other not in (fold, inner)])
        path = [trained.at(penalty.expand(len(features)), classes) for penalty in grid]
        held, answer = features[:, members[inner]], labels[:, members[inner]]
        accuracy = torch.stack([probes.scores(held).argmax(-1).eq(answer).float().mean((1, 2)) for probes in path])
        best_accuracy, penalty = _chosen(accuracy, grid)
        final = trained_on([other for other in range(count) if other != fold]).at(penalty, classes)
        yield FittedFold(members[fold], members[inner], _picked(path, penalty, grid), final, best_accuracy, penalty)


def _above_share(
    probes: LinearProbes, features: Float[Tensor, "probes samples dim"]
) -> Float[Tensor, "probes targets samples classes"]:
    """A ridge score less the class's share of the training set: what the features add."""
    return replace(probes, intercept=torch.zeros_like(probes.intercept)).scores(features)


def _checked(labels: Int[Tensor, "targets samples"], folds: Int[Tensor, "samples"], classes: int) -> int:
    """The number of folds."""
    count = int(folds.max()) + 1
    if count < 3:
        raise UserError(f"Ridge probes need at least 3 folds (train, inner, test); got {count}.")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UserError(f"Labels must lie in 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}.")
    return count


def _rows(
    batches: Callable[[], Iterable[Float[Tensor, "probes batch dim"]]], samples: int
) -> Iterator[tuple[slice, Float[Tensor, "probes batch dim"]]]:
    """A pass over the features: each batch with its rows."""
    done = 0
    for batch in batches():
        rows = slice(done, done + batch.shape[1])
        done = rows.stop
        if done <= samples:
            yield rows, batch
    if done != samples:
        raise UserError(f"A pass over the features gave {done} samples for {samples} labels; each pass must give all.")


def _grid(penalties: Sequence[float], dim: int, dtype: torch.dtype) -> Float[Tensor, "penalties"]:
    # The eigenvalues of a Gram matrix of unit-variance features reach up to its dimension, and so does their round-off:
    # a smaller penalty could not make it positive definite.
    return torch.tensor(list(penalties), dtype=dtype).clamp(min=4 * torch.finfo(dtype).eps * dim)


def _chosen(
    accuracy: Float[Tensor, "penalties probes"], grid: Float[Tensor, "penalties"]
) -> tuple[Float[Tensor, "probes"], Float[Tensor, "probes"]]:
    """The best accuracy and its penalty; of equally good penalties the largest."""
    # argmax of the reversed grid finds the last maximum.
    best = len(grid) - 1 - accuracy.flip(0).argmax(0)
    return accuracy.gather(0, best[None])[0], grid[best]


def _picked(
    path: Sequence[LinearProbes], penalty: Float[Tensor, "probes"], grid: Float[Tensor, "penalties"]
) -> LinearProbes:
    """Each probe of a path at its own penalty."""
    weights = path[0].weights.clone()
    for probes, candidate in zip(path, grid, strict=True):
        weights = torch.where((penalty == candidate)[:, None, None], probes.weights, weights)
    return LinearProbes(path[0].mean, weights, path[0].intercept, path[0].classes)


class _Ridge:
    """Ridge regression on standardised features, ready for any penalty."""

    def __init__(self, training: Moments, floor: Float[Tensor, "probes 1"]) -> None:
        """Scale the moments of `training` in place."""
        self.count, self.mean, self.intercept = training.count, training.features, training.answers
        deviation = (training.gram.diagonal(dim1=1, dim2=2) / self.count).sqrt()
        self.scale = torch.where(deviation > floor, 1 / deviation, 0.0)
        self.gram = training.gram.mul_(self.scale[:, :, None]).mul_(self.scale[:, None, :])
        self.cross = training.cross.mul_(self.scale[:, :, None])

    def at(self, penalty: Float[Tensor, "probes"], classes: int) -> LinearProbes:
        """The probes, each at its own penalty."""
        gram = self.gram.clone()
        gram.diagonal(dim1=1, dim2=2).add_((penalty * self.count)[:, None])
        factor = torch.linalg.cholesky(gram)
        half = torch.linalg.solve_triangular(factor, self.cross, upper=False)
        weights = torch.linalg.solve_triangular(factor.mT, half, upper=True).mul_(self.scale[:, :, None])
        return LinearProbes(self.mean, weights, self.intercept.expand(len(weights), -1), classes)


class _KernelRidge:
    """The same regression from the inner products of samples, which is less work where features outnumber samples."""

    def __init__(
        self,
        features: Float[Tensor, "probes samples dim"],
        answers: Float[Tensor, "samples outputs"],
        floor: Float[Tensor, "probes 1"],
    ) -> None:
        self.mean, self.intercept = features.mean(1), answers.mean(0)
        centred = features - self.mean[:, None]
        deviation = centred.square().mean(1).sqrt()
        self.scale = torch.where(deviation > floor, 1 / deviation, 0.0)
        self.seen = centred * self.scale[:, None]
        self.kernel = self.seen @ self.seen.mT
        self.answers = answers - self.intercept

    def at(self, penalty: Float[Tensor, "probes"], classes: int) -> LinearProbes:
        """The probes, each at its own penalty."""
        kernel = self.kernel.clone()
        kernel.diagonal(dim1=1, dim2=2).add_((penalty * len(self.answers))[:, None])
        dual = torch.cholesky_solve(self.answers.expand(len(kernel), -1, -1), torch.linalg.cholesky(kernel))
        weights = (self.seen.mT @ dual).mul_(self.scale[:, :, None])
        return LinearProbes(self.mean, weights, self.intercept.expand(len(weights), -1), classes)
