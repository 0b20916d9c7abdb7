"""From features to fitted probes: the same probe at every site of every family under one split, and the site that each
fold chooses.

All that probes read passes through here: `kvprobe.probing.probe_features` and the studies take predictions, bits and
tables of accuracies from the same fits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.models.lens import Family
from kvprobe.probing.calibration import calibrated_probes
from kvprobe.probing.features import Features, Site
from kvprobe.probing.intervals import held_out_means
from kvprobe.probing.permutation import permuted_hits
from kvprobe.probing.splits import Split
from kvprobe.stats import SHARE


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

    def columns(self) -> dict[str, Any]:
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


def fit_sites(
    features: Features,
    split: Split,
    folds: Int[np.ndarray, "samples"],
    *,
    labels: Int[Tensor, "targets samples"] | None = None,
    done: Callable[[int], object] = lambda probes: None,
) -> Fits:
    """Cross-validated, calibrated probes at every site.

    Args:
        labels: those of the features by default; a control task has others.
        done: called with the number of probes that were just fitted.

    Raises:
        UserError: see `calibrated_probes`.
    """
    labels = features.labels if labels is None else labels
    contexts = None if split == "random" else features.contexts
    predicted, information, inner = [], [], []
    for family in features.tensors:
        for _, seen, size in features.batches(family, split):
            # Sites that the labels cannot reach are rightly constant.
            result = calibrated_probes(
                seen,
                labels.to(seen.device),
                torch.from_numpy(folds).to(seen.device),
                len(features.target.classes),
                contexts=contexts,
                size=size,
                may_be_constant=True,
            )
            predicted.append(result.predicted.cpu())
            information.append(result.information.mean(1).cpu())
            inner.append(result.inner_accuracy.cpu())
            done(len(seen))
    sites = tuple((family, site) for family in features.tensors for site in features.sites[family])
    return Fits(sites, torch.cat(predicted), torch.cat(information), torch.cat(inner))


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
    scores = []
    for family in features.tensors:
        for _, seen, size in features.batches(family, split):
            labels, fold_numbers = features.labels.to(seen.device), torch.from_numpy(folds).to(seen.device)
            scores.append(permuted_hits(seen, labels, fold_numbers, len(features.target.classes), orders, size))
            done(len(seen))
    return np.concatenate(scores, 1)
