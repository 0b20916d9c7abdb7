"""From features to fitted probes: the same probe at every site of every family under one split, and the site that each
fold chooses.

All that probes read passes through here: `kvprobe.probing.probe_features` and the studies take predictions, bits and
tables of accuracies from the same fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.models.lens import Family
from kvprobe.probing.calibration import CalibratedResult, calibrated_tasks, joined
from kvprobe.probing.features import Batch, Features, Site
from kvprobe.probing.intervals import held_out_means
from kvprobe.probing.permutation import permuted_hits
from kvprobe.probing.splits import Split
from kvprobe.stats import SHARE
from kvprobe.threads import side_by_side


@dataclass(frozen=True)
class Fits:
    """Out-of-fold predictions at every site.

    Attributes:
        sites: family and site of each probe.
        predicted: classes.
        information: bits that each sample's vector gives about its classes, mean over targets.
        inner_accuracy: accuracy on the inner fold, by outer fold. Nothing else may be used to choose between sites.
    """

    sites: tuple[tuple[Family, Site], ...]
    predicted: Int[Tensor, "sites targets samples"]
    information: Float[Tensor, "sites samples"]
    inner_accuracy: Float[Tensor, "sites folds"]

    def hits(self, labels: Int[Tensor, "targets samples"]) -> Float[np.ndarray, "sites samples"]:
        """Share of each sample's targets that are read right."""
        return self.predicted.eq(labels).double().mean(1).numpy()

    def columns(self) -> dict[str, object]:
        """Where each probe reads, as columns of a table."""
        return {
            "family": [family for family, _ in self.sites],
            "layer": [site.layer for _, site in self.sites],
            "head": pd.array([site.head for _, site in self.sites], dtype="Int64"),
            "read": [site.read for _, site in self.sites],
        }

    def accuracies(
        self, labels: Int[Tensor, "targets samples"], clusters: Int[np.ndarray, "samples"], **constant: str
    ) -> pd.DataFrame:
        """One row per site: accuracy (mean over targets) with `low` and `high`, beside the `constant` columns."""
        accuracy, low, high = held_out_means(self.hits(labels), clusters, SHARE)
        return pd.DataFrame({**constant, **self.columns(), "accuracy": accuracy, "low": low, "high": high})


@dataclass(frozen=True)
class Chosen:
    """The predictions of the site that did best on each fold's inner fold; the search over sites does not inflate them.

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


def fit_sites(features: Features, split: Split, folds: Int[np.ndarray, "samples"]) -> Fits:
    """Cross-validated, calibrated probes at every site; raises as `fit_tasks` does."""
    return fit_tasks(features, split, folds, [features.labels])[0]


def fit_tasks(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    tasks: Sequence[Int[Tensor, "_ samples"]],
    *,
    done: Callable[[int], object] = lambda probes: None,
) -> list[Fits]:
    """`fit_sites` for several tasks, the labels of each; what does not depend on labels is computed once.

    Args:
        done: called with the number of probes that were just fitted.

    Raises:
        UserError: see `calibrated_tasks`.
    """
    contexts, classes = None if split == "random" else features.contexts, len(features.target.classes)

    def fitted(batch: Batch) -> list[CalibratedResult]:
        seen, size = batch
        numbers, here = torch.from_numpy(folds).to(seen.device), [labels.to(seen.device) for labels in tasks]
        return calibrated_tasks(seen, here, numbers, classes, contexts=contexts, size=size)

    results = []
    for batch in side_by_side(fitted, features.batches(split), features.at_once):
        results.append(batch)
        done(len(tasks) * len(batch[0].predicted))
    whole = [joined(parts) for parts in zip(*results, strict=True)]
    return [
        Fits(
            features.family_sites,
            result.predicted.cpu(),
            result.information.mean(1).cpu(),
            result.inner_accuracy.cpu(),
        )
        for result in whole
    ]


def chosen(fits: Fits, folds: Int[np.ndarray, "samples"]) -> Chosen:
    """For each test fold, the predictions of the site that did best on its inner fold.

    The choice never sees the test fold, so the search over layers, families and read-outs does not inflate the accuracy
    of these predictions.
    """
    predicted, information = torch.empty_like(fits.predicted[0]), torch.empty_like(fits.information[0])
    picks = []
    for fold, best in enumerate(fits.inner_accuracy.argmax(0).tolist()):
        rows = torch.from_numpy(np.flatnonzero(folds == fold))
        predicted[:, rows] = fits.predicted[best][:, rows]
        information[rows] = fits.information[best][rows]
        picks.append(fits.sites[best])
    return Chosen(predicted, information, tuple(picks))


def permuted_scores(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    orders: Int[np.ndarray, "count samples"],
    *,
    done: Callable[[int], object] = lambda probes: None,
) -> Float[np.ndarray, "assignments sites"]:
    """`kvprobe.probing.permutation.permuted_hits` at every site."""
    classes = len(features.target.classes)

    def permuted(batch: Batch) -> Float[np.ndarray, "assignments probes"]:
        seen, size = batch
        labels, numbers = features.labels.to(seen.device), torch.from_numpy(folds).to(seen.device)
        return permuted_hits(seen, labels, numbers, classes, orders, size)

    scores = []
    for batch in side_by_side(permuted, features.batches(split), features.at_once):
        scores.append(batch)
        done(batch.shape[1])
    return np.concatenate(scores, 1)
