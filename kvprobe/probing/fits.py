"""The same probe at every site of every family, under one split; and the one that a careful reader would have chosen."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.models.lens import Family
from kvprobe.probing.calibration import Solver, calibrated_probes
from kvprobe.probing.features import Features, Site
from kvprobe.probing.permutation import permuted_hits
from kvprobe.probing.splits import Split


@dataclass(frozen=True)
class Fits:
    """Out-of-fold predictions at every site.

    Attributes:
        sites: family and site of each probe.
        predicted: classes.
        information: bits that each sample's vector tells of its classes, mean over targets.
        inner_accuracy: accuracy on the inner fold, by outer fold: all that may be used to choose between sites.
    """

    sites: tuple[tuple[Family, Site], ...]
    predicted: Int[Tensor, "sites targets samples"]
    information: Float[Tensor, "sites samples"]
    inner_accuracy: Float[Tensor, "sites folds"]


@dataclass(frozen=True)
class Chosen:
    """The predictions of the site that did best on each fold's inner fold, which the search over sites cannot flatter.

    Attributes:
        picks: the site of each test fold.
    """

    predicted: Int[Tensor, "targets samples"]
    information: Float[Tensor, "samples"]
    picks: tuple[tuple[Family, Site], ...]

    @property
    def usual(self) -> tuple[Family, Site]:
        """The site that most folds chose."""
        return max(self.picks, key=self.picks.count)


def fit_sites(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    *,
    labels: Int[Tensor, "targets samples"] | None = None,
    solver: Solver = "ridge",
    done: Callable[[int], object] = lambda probes: None,
) -> Fits:
    """Cross-validated, calibrated probes at every site.

    Args:
        labels: those of the features by default; a control task has others.
        done: is told how many probes were fitted.

    Raises:
        UserError: see `calibrated_probes`.
    """
    labels = features.labels if labels is None else labels
    contexts = None if split == "random" else features.contexts
    predicted, information, inner = [], [], []
    for family in features.tensors:
        for _, seen, size in features.batches(family, split):
            # Some sites rightly do not vary: those that the labels cannot reach.
            result = calibrated_probes(
                seen,
                labels.to(seen.device),
                torch.from_numpy(folds).to(seen.device),
                len(features.target.classes),
                solver,
                contexts=contexts,
                size=size,
                may_be_constant=True,
            )
            predicted.append(result.predicted.cpu())
            information.append(result.information.mean(1).cpu())
            inner.append(result.inner_accuracy.cpu())
            done(len(seen))
    return Fits(_sites(features), torch.cat(predicted), torch.cat(information), torch.cat(inner))


def permuted_scores(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    orders: Int[np.ndarray, "count samples"],
    *,
    done: Callable[[int], object] = lambda probes: None,
) -> Float[np.ndarray, "assignments sites"]:
    """`kvprobe.probing.permutation.permuted_hits` at every site."""
    scores = []
    for family in features.tensors:
        for _, seen, size in features.batches(family, split):
            labels, number = features.labels.to(seen.device), torch.from_numpy(folds).to(seen.device)
            scores.append(permuted_hits(seen, labels, number, len(features.target.classes), orders, size))
            done(len(seen))
    return np.concatenate(scores, 1)


def chosen(fits: Fits, folds: Int[np.ndarray, "samples"]) -> Chosen:
    """For each test fold the predictions of the site that did best on its inner fold."""
    predicted, information = torch.empty_like(fits.predicted[0]), torch.empty_like(fits.information[0])
    picks = []
    for fold, best in enumerate(fits.inner_accuracy.argmax(0).tolist()):
        rows = torch.from_numpy(np.flatnonzero(folds == fold))
        predicted[:, rows] = fits.predicted[best][:, rows]
        information[rows] = fits.information[best][rows]
        picks.append(fits.sites[best])
    return Chosen(predicted, information, tuple(picks))


def _sites(features: Features) -> tuple[tuple[Family, Site], ...]:
    return tuple((family, site) for family in features.tensors for site in features.sites[family])
