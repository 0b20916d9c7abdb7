"""Moments of features, batch by batch: all that ridge regression needs, in memory that does not grow with the samples.

Each set of samples has its count, its means, and its Gram matrices about these means. Disjoint sets are merged (Chan,
Golub and LeVeque 1979), so large means do not cancel and each batch is seen once. With one-hot answers the
cross moments are the sums of each class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.probing.linear import check_features


@dataclass(frozen=True)
class Moments:
    """What ridge regression needs to know about a set of samples; disjoint sets can be merged."""

    count: int
    features: Float[Tensor, "probes dim"]
    answers: Float[Tensor, "outputs"]
    gram: Float[Tensor, "probes dim dim"]
    cross: Float[Tensor, "probes dim outputs"]

    @classmethod
    def of(cls, features: Float[Tensor, "probes samples dim"], answers: Float[Tensor, "samples outputs"]) -> "Moments":
        """Moments of at least one sample."""
        mean, answer_mean = features.mean(1), answers.mean(0)
        centred = (features - mean[:, None]).transpose(1, 2)
        return cls(len(answers), mean, answer_mean, centred @ centred.mT, centred @ (answers - answer_mean))

    @classmethod
    def merged(cls, parts: Sequence["Moments"]) -> "Moments":
        """Moments of the union of disjoint sets."""
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

    def double(self) -> "Moments":
        """The same in fp64."""
        tensors = (self.features, self.answers, self.gram, self.cross)
        return Moments(self.count, *(tensor.double() for tensor in tensors))

    @property
    def size(self) -> Float[Tensor, "probes"]:
        """Root mean square of what each probe reads."""
        return (self.gram.diagonal(dim1=1, dim2=2) / self.count + self.features.square()).mean(1).sqrt()


class FoldMoments:
    """Moments of each fold, from batches of samples in any order.

    The moments of a batch are taken in the precision of the features and added up in fp64, so that many small batches
    are as exact as one large one.
    """

    def __init__(self, folds: int, classes: int) -> None:
        self.classes = classes
        self._parts: list[Moments | None] = [None] * folds

    def update(
        self,
        features: Float[Tensor, "probes batch dim"],
        labels: Int[Tensor, "targets batch"],
        folds: Int[Tensor, "batch"],
    ) -> None:
        """Take in a batch.

        Raises:
            UserError: features that are not finite, or labels or folds out of range.
        """
        check_features(features)
        if int(labels.min()) < 0 or int(labels.max()) >= self.classes:
            raise UserError(
                f"Labels must lie in 0 to {self.classes - 1}; got {int(labels.min())} to {int(labels.max())}."
            )
        if int(folds.min()) < 0 or int(folds.max()) >= len(self._parts):
            raise UserError(
                f"Folds must lie in 0 to {len(self._parts) - 1}; got {int(folds.min())} to {int(folds.max())}."
            )
        answers = one_hot_answers(labels, self.classes, features.dtype)
        for fold in folds.unique().tolist():
            rows = torch.nonzero(folds == fold)[:, 0]
            self._add(fold, Moments.of(features[:, rows], answers[rows]).double())

    def merge(self, other: "FoldMoments") -> None:
        """Take in the moments of other samples, of another shard for example."""
        for fold, part in enumerate(other._parts):
            if part is not None:
                self._add(fold, part)

    def of(self, folds: Sequence[int]) -> Moments:
        """Moments of the samples of these folds.

        Raises:
            UserError: none of these folds has a sample yet.
        """
        parts = [part for fold in folds if (part := self._parts[fold]) is not None]
        if not parts:
            raise UserError(f"No sample is in folds {list(folds)} yet; call update first.")
        return Moments.merged(parts)

    def _add(self, fold: int, part: Moments) -> None:
        before = self._parts[fold]
        self._parts[fold] = part if before is None else Moments.merged([before, part])


def one_hot_answers(
    labels: Int[Tensor, "targets samples"], classes: int, dtype: torch.dtype
) -> Float[Tensor, "samples outputs"]:
    """One column for each class of each target, 1 where the sample is of that class."""
    onehot = torch.nn.functional.one_hot(labels, classes).to(dtype)
    return onehot.permute(1, 0, 2).reshape(labels.shape[1], -1)
