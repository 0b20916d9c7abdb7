"""Thousands of multi-class ridge probes in one batched solve.

One-hot labels are regressed on standardised features; the largest score wins. All probes (layers, K or V,
read-outs) and all targets (digits) are solved together. Each fold's moments are computed once, about its own mean,
and training sets are merged from folds (Chan, Golub and LeVeque 1979), so cross-validation costs no further pass
over the features and large means do not cancel. The penalty is chosen on an inner fold; the test fold is touched
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties per training sample, on features of unit variance."""

VARIANCE_FLOOR = 1e-5
"""Features that vary less than this, relative to the size of what the probe reads, are constant but for round-off."""


@dataclass(frozen=True)
class RidgeResult:
    """Out-of-fold predictions of a batch of probes.

    Attributes:
        predicted: class of each sample, by probes that were not trained on it.
        inner_accuracy: accuracy on the inner fold at the chosen penalty, by outer fold. It is all that may be
            used to choose between probes.
        penalty: the chosen penalty, by outer fold.
    """

    predicted: Int[Tensor, "probes targets samples"]
    inner_accuracy: Float[Tensor, "probes folds"]
    penalty: Float[Tensor, "probes folds"]


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
        ValueError: fewer than three folds, labels out of range, or features that are not finite.
    """
    count = int(folds.max()) + 1
    if count < 3:
        raise ValueError(f"Ridge probes need at least 3 folds (train, inner, test); got {count}.")
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ValueError(f"Labels must lie in 0 to {classes - 1}; got {int(labels.min())} to {int(labels.max())}.")
    if not bool(torch.isfinite(features).all()):
        raise ValueError("Features hold NaN or infinity; a probe needs finite numbers.")

    if size is None:
        size = features.square().mean((1, 2)).sqrt()
    floor = (VARIANCE_FLOOR * size)[:, None]
    onehot = torch.nn.functional.one_hot(labels, classes).to(features.dtype)
    answers = onehot.permute(1, 0, 2).reshape(labels.shape[1], -1)

    members = [torch.nonzero(folds == fold)[:, 0] for fold in range(count)]
    parts = [_Moments.of(features[:, rows], answers[rows]) for rows in members]

    predicted = torch.empty(len(features), *labels.shape, dtype=torch.long, device=features.device)
    inner_accuracy = torch.empty(len(features), count, device=features.device)
    chosen_penalty = torch.empty(len(features), count, device=features.device)
    grid = torch.tensor(list(penalties), dtype=features.dtype, device=features.device)
    # The eigenvalues of a Gram matrix of unit-variance features reach up to its dimension, and so does their round-off:
    # a smaller penalty could not make it positive definite.
    grid = grid.clamp(min=4 * torch.finfo(features.dtype).eps * features.shape[2])
    for fold in range(count):
        inner = (fold + 1) % count
        training = _Moments.merged([part for other, part in enumerate(parts) if other not in (fold, inner)])
        trained = _Ridge(training, floor)
        accuracy = torch.stack(
            [
                trained.classify(penalty.expand(len(features)), features[:, members[inner]], classes)
                .eq(labels[:, members[inner]])
                .float()
                .mean((1, 2))
                for penalty in grid
            ]
        )
        # Of equally good penalties the largest: argmax of the reversed grid finds the last maximum.
        best = len(grid) - 1 - accuracy.flip(0).argmax(0)
        inner_accuracy[:, fold] = accuracy.gather(0, best[None])[0]
        chosen_penalty[:, fold] = grid[best]
        training = _Moments.merged([part for other, part in enumerate(parts) if other != fold])
        trained = _Ridge(training, floor)
        predicted[:, :, members[fold]] = trained.classify(grid[best], features[:, members[fold]], classes)
    return RidgeResult(predicted, inner_accuracy, chosen_penalty)


@dataclass(frozen=True)
class _Moments:
    """What ridge regression needs to know of a set of samples; disjoint sets can be merged."""

    count: int
    features: Float[Tensor, "probes dim"]
    answers: Float[Tensor, "outputs"]
    gram: Float[Tensor, "probes dim dim"]
    cross: Float[Tensor, "probes dim outputs"]

    @classmethod
    def of(cls, features: Float[Tensor, "probes samples dim"], answers: Float[Tensor, "samples outputs"]) -> "_Moments":
        mean, answer_mean = features.mean(1), answers.mean(0)
        turned = (features - mean[:, None]).transpose(1, 2)
        return cls(len(answers), mean, answer_mean, turned @ turned.mT, turned @ (answers - answer_mean))

    @classmethod
    def merged(cls, parts: Sequence["_Moments"]) -> "_Moments":
        share = torch.tensor([part.count for part in parts], dtype=parts[0].features.dtype)
        share = share.to(parts[0].features.device)
        features = torch.stack([part.features for part in parts], 1)
        answers = torch.stack([part.answers for part in parts])
        mean, answer_mean = (share @ features) / share.sum(), (share @ answers) / share.sum()
        # Between-set scatter: as many rank-one terms as there are sets.
        away = (features - mean[:, None]).transpose(1, 2)
        gram = torch.baddbmm(parts[0].gram, away * share, away.mT)
        cross = parts[0].cross + (away * share) @ (answers - answer_mean)
        for part in parts[1:]:
            gram += part.gram
            cross += part.cross
        return cls(sum(part.count for part in parts), mean, answer_mean, gram, cross)


class _Ridge:
    """Ridge regression on standardised features, ready for any penalty."""

    def __init__(self, training: _Moments, floor: Float[Tensor, "probes 1"]) -> None:
        """Scale the moments of `training`, which are used up."""
        self.count, self.mean, self.intercept = training.count, training.features, training.answers
        deviation = (training.gram.diagonal(dim1=1, dim2=2) / self.count).sqrt()
        self.scale = torch.where(deviation > floor, 1 / deviation, 0.0)
        self.gram = training.gram.mul_(self.scale[:, :, None]).mul_(self.scale[:, None, :])
        self.cross = training.cross.mul_(self.scale[:, :, None])

    def classify(
        self, penalty: Float[Tensor, "probes"], test: Float[Tensor, "probes samples dim"], classes: int
    ) -> Int[Tensor, "probes targets samples"]:
        """The class with the largest score, for each target and test sample."""
        gram = self.gram.clone()
        gram.diagonal(dim1=1, dim2=2).add_((penalty * self.count)[:, None])
        factor = torch.linalg.cholesky(gram)
        half = torch.linalg.solve_triangular(factor, self.cross, upper=False)
        weights = torch.linalg.solve_triangular(factor.mT, half, upper=True).mul_(self.scale[:, :, None])
        scores = torch.baddbmm(self.intercept.expand(1, -1), test - self.mean[:, None], weights)
        return scores.unflatten(-1, (-1, classes)).argmax(-1).transpose(1, 2)
