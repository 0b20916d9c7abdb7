"""Thousands of multi-class ridge probes in one batched solve.

One-hot labels are regressed on standardised features; the largest score wins. All probes (layers, K or V,
read-outs) and all targets (digits) are solved together, from moments of each fold (`kvprobe.probing.gram`), so
cross-validation costs no further pass over the features. The penalty is chosen on an inner fold; the test fold is
touched once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.gram import FoldMoments, Moments, one_hot_answers
from kvprobe.probing.linear import LinearProbes, check_features
from kvprobe.threads import one_thread

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties per training sample, on features of unit variance."""

VARIANCE_FLOOR = 1e-5
"""Features that vary less than this, relative to the size of what the probe reads, are constant but for round-off."""

ALL_OUTPUTS = slice(None)


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
    return ridge_evidence(features, [labels], folds, classes, penalties, size)[0]


@one_thread()
def ridge_evidence(
    features: Float[Tensor, "probes samples dim"],
    tasks: Sequence[Int[Tensor, "_ samples"]],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    size: Float[Tensor, "probes"] | None = None,
) -> list[RidgeEvidence]:
    """The same probes with what they say about every class, for several tasks: labels that are read from the same
    features, each at the penalty that suits it. Other arguments and errors are those of `ridge_probes`.
    """
    results = []
    for labels in tasks:
        shape = (len(features), *labels.shape)
        predicted = torch.empty(shape, dtype=torch.long, device=features.device)
        by_fold = features.new_empty(2, len(features), int(folds.max()) + 1)
        results.append(RidgeEvidence(predicted, *by_fold, *features.new_empty(2, *shape, classes)))
    for fold, fitted in enumerate(fitted_by_fold(features, tasks, folds, classes, penalties, size)):
        for result, task in zip(results, fitted, strict=True):
            result.inner_accuracy[:, fold] = task.inner_accuracy
            result.penalty[:, fold] = task.penalty
            result.inner_evidence[:, :, task.inner] = task.inner_evidence
            result.evidence[:, :, task.test] = task.evidence
            result.predicted[:, :, task.test] = task.predicted
    return results


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
    best, accuracy = _best((hits / held).flatten(1))
    penalty = grid[best].view(probes, count)

    final = [
        _Ridge(moments.of([other for other in range(count) if other != fold]), floor).at(penalty[:, fold], classes)
        for fold in range(count)
    ]
    predicted = torch.empty(probes, *labels.shape, dtype=torch.long, device=grid.device)
    for rows, batch in _rows(batches, len(folds)):
        for fold, trained in enumerate(final):
            test = torch.nonzero(folds[rows] == fold)[:, 0]
            predicted[:, :, rows.start + test] = trained.scores(batch[:, test]).argmax(-1)
    return RidgeResult(predicted, accuracy.view(probes, count).float(), penalty.float())


@dataclass(frozen=True)
class FittedFold:
    """Probes of one outer fold and task: those that chose the penalty, and those trained on the inner fold too.

    Attributes:
        share: of each class in the whole training set.
        evidence: what the features of the test fold add to it; `inner_evidence`, those of the inner fold to its own
            training set's.
    """

    test: Int[Tensor, "held"]
    inner: Int[Tensor, "inner_held"]
    inner_accuracy: Float[Tensor, "probes"]
    penalty: Float[Tensor, "probes"]
    inner_evidence: Float[Tensor, "probes targets inner_held classes"]
    evidence: Float[Tensor, "probes targets held classes"]
    share: Float[Tensor, "targets 1 classes"]
    trained: "_Ridge | _KernelRidge"
    outputs: slice

    @property
    def predicted(self) -> Int[Tensor, "probes targets held"]:
        return (self.evidence + self.share).argmax(-1)

    @property
    def probes(self) -> LinearProbes:
        return self.trained.at(self.penalty, self.share.shape[-1], self.outputs)


def fitted_by_fold(
    features: Float[Tensor, "probes samples dim"],
    tasks: Sequence[Int[Tensor, "_ samples"]],
    folds: Int[Tensor, "samples"],
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    size: Float[Tensor, "probes"] | None = None,
    only: Sequence[int] | None = None,
) -> Iterator[list[FittedFold]]:
    """The probes of each task (its labels) for each outer fold in turn, or for these only."""
    labels = torch.cat(list(tasks))
    count = _checked(labels, folds, classes)
    check_features(features)
    if size is None:
        size = features.square().mean((1, 2)).sqrt()
    floor = (VARIANCE_FLOOR * size)[:, None]
    answers = one_hot_answers(labels, classes, features.dtype)
    members = [torch.nonzero(folds == fold)[:, 0] for fold in range(count)]
    # Where features outnumber the samples of a training set, samples are the smaller of the two systems of equations.
    few = features.shape[2] > features.shape[1] - min(map(len, members))
    parts = [] if few else [Moments.of(features[:, rows], answers[rows]) for rows in members]

    def trained_on(training_folds: Sequence[int]) -> _Ridge | _KernelRidge:
        if few:
            rows = torch.cat([members[other] for other in training_folds])
            return _KernelRidge(features[:, rows], answers[rows], floor)
        return _Ridge(Moments.merged([parts[other] for other in training_folds]), floor)

    ends = [0, *accumulate(map(len, tasks))]
    grid = _grid(penalties, features.shape[2], features.dtype).to(features.device)
    every = torch.arange(len(features), device=features.device)
    for fold in range(count) if only is None else only:
        inner, test = members[(fold + 1) % count], members[fold]
        path = trained_on([other for other in range(count) if other not in (fold, (fold + 1) % count)])
        asked, share = path.asked(features[:, inner]), path.intercept.view(len(labels), 1, classes)
        by_penalty = torch.stack(
            [path.evidence(asked, penalty.expand(len(features))).unflatten(-1, (-1, classes)) for penalty in grid]
        ).transpose(2, 3)
        right = (by_penalty + share).argmax(-1).eq(labels[:, inner]).to(features.dtype)
        whole = trained_on([other for other in range(count) if other != fold])
        asked, share = whole.asked(features[:, test]), whole.intercept.view(len(labels), 1, classes)
        fitted = []
        for first, last in pairwise(ends):
            targets, outputs = slice(first, last), slice(first * classes, last * classes)
            best, accuracy = _best(right[:, :, targets].mean((2, 3)))
            inner_evidence = by_penalty[best, every][:, targets]
            evidence = whole.evidence(asked, grid[best], outputs).unflatten(-1, (-1, classes)).transpose(1, 2)
            fitted.append(
                FittedFold(test, inner, accuracy, grid[best], inner_evidence, evidence, share[targets], whole, outputs)
            )
        yield fitted


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


def _best(
    accuracy: Float[Tensor, "penalties probes"],
) -> tuple[Int[Tensor, "probes"], Float[Tensor, "probes"]]:
    """Number of the best penalty, of equally good ones the last and largest, and its accuracy."""
    # argmax of the reversed path finds the last maximum.
    best = len(accuracy) - 1 - accuracy.flip(0).argmax(0)
    return best, accuracy.gather(0, best[None])[0]


class _Ridge:
    """Ridge regression on standardised features, ready for any penalty."""

    def __init__(self, training: Moments, floor: Float[Tensor, "probes 1"]) -> None:
        """Scale the moments of `training` in place."""
        self.count, self.mean, self.intercept = training.count, training.features, training.answers
        deviation = (training.gram.diagonal(dim1=1, dim2=2) / self.count).sqrt()
        self.scale = torch.where(deviation > floor, 1 / deviation, 0.0)
        self.gram = training.gram.mul_(self.scale[:, :, None]).mul_(self.scale[:, None, :])
        self.cross = training.cross.mul_(self.scale[:, :, None])

    def at(self, penalty: Float[Tensor, "probes"], classes: int, outputs: slice = ALL_OUTPUTS) -> LinearProbes:
        """The probes of some outputs, each at its own penalty."""
        weights = self._solved(penalty, outputs).mul_(self.scale[:, :, None])
        return LinearProbes(self.mean, weights, self.intercept[outputs].expand(len(weights), -1), classes)

    def asked(self, held: Float[Tensor, "probes held dim"]) -> Float[Tensor, "probes held dim"]:
        """What `evidence` needs to know of held-out samples."""
        return (held - self.mean[:, None]).mul_(self.scale[:, None])

    def evidence(
        self, asked: Float[Tensor, "probes held dim"], penalty: Float[Tensor, "probes"], outputs: slice = ALL_OUTPUTS
    ) -> Float[Tensor, "probes held outputs"]:
        """What the features add to the shares of the training set."""
        return asked @ self._solved(penalty, outputs)

    def _solved(self, penalty: Float[Tensor, "probes"], outputs: slice) -> Float[Tensor, "probes dim outputs"]:
        return divided(self.cross[:, :, outputs].mT, self.gram, penalty * self.count).mT


class _KernelRidge:
    """The same regression from the inner products of samples, which is less work where features outnumber samples."""

    def __init__(
        self,
        features: Float[Tensor, "probes samples dim"],
        answers: Float[Tensor, "samples outputs"],
        floor: Float[Tensor, "probes 1"],
    ) -> None:
        self.mean, self.intercept = features.mean(1), answers.mean(0)
        self.seen = features - self.mean[:, None]
        deviation = self.seen.square().mean(1).sqrt()
        self.scale = torch.where(deviation > floor, 1 / deviation, 0.0)
        self.seen.mul_(self.scale[:, None])
        self.kernel = self.seen @ self.seen.mT
        self.answers = answers - self.intercept

    def at(self, penalty: Float[Tensor, "probes"], classes: int, outputs: slice = ALL_OUTPUTS) -> LinearProbes:
        """See `_Ridge.at`."""
        weights = (self.seen.mT @ self._solved(penalty, outputs)).mul_(self.scale[:, :, None])
        return LinearProbes(self.mean, weights, self.intercept[outputs].expand(len(weights), -1), classes)

    def asked(self, held: Float[Tensor, "probes held dim"]) -> Float[Tensor, "probes held samples"]:
        """See `_Ridge.asked`."""
        return (held - self.mean[:, None]).mul_(self.scale[:, None]) @ self.seen.mT

    def evidence(
        self,
        asked: Float[Tensor, "probes held samples"],
        penalty: Float[Tensor, "probes"],
        outputs: slice = ALL_OUTPUTS,
    ) -> Float[Tensor, "probes held outputs"]:
        """See `_Ridge.evidence`."""
        answers = self.answers[:, outputs]
        if asked.shape[1] > answers.shape[1]:
            return asked @ self._solved(penalty, outputs)
        return divided(asked, self.kernel, penalty * len(answers)) @ answers

    def _solved(self, penalty: Float[Tensor, "probes"], outputs: slice) -> Float[Tensor, "probes samples outputs"]:
        answers = self.answers[:, outputs].T.expand(len(self.kernel), -1, -1)
        return divided(answers, self.kernel, penalty * len(self.answers)).mT


def divided(
    rows: Float[Tensor, "probes rows size"], gram: Float[Tensor, "probes size size"], ridge: Float[Tensor, "probes"]
) -> Float[Tensor, "probes rows size"]:
    """rows (gram + ridge I)⁻¹. From the right, since LAPACK is then nearly twice as fast on a few dozen rows."""
    stiff = gram.clone()
    stiff.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    factor = torch.linalg.cholesky(stiff)
    half = torch.linalg.solve_triangular(factor.mT, rows, upper=True, left=False)
    return torch.linalg.solve_triangular(factor, half, upper=False, left=False)
