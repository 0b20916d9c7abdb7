"""Probes of one arm under every split: what each sample's vector gives away, at the site that its fold chose.

This is what arms are compared by. `kvprobe.probing.probe_features` gives the same with floors, controls and p-values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, Site
from kvprobe.probing.fits import chosen, fit_sites
from kvprobe.probing.splits import SPLITS, Split, fold_numbers

Folds = Mapping[Split, Int[np.ndarray, "samples"]]
"""The test fold of each sample, by split."""


@dataclass(frozen=True)
class BySplit:
    """What probes read of the same samples under each split.

    Attributes:
        samples: one row per `split` and `sample` (with its `context`): the share of its targets that is read right
            (`accuracy`) and the `bits` per target, from the site that the inner fold chose.
        probes: one row per `split` and site, see `kvprobe.probing.fits.Fits.accuracies`.
        picks: see `picked_sites`.
        sites: family and site of each probe.
        inner: accuracy of each on the inner folds, by which alone one may be chosen.
    """

    samples: pd.DataFrame
    probes: pd.DataFrame
    picks: pd.DataFrame
    sites: tuple[tuple[Family, Site], ...]
    inner: Mapping[Split, Float[Tensor, "sites folds"]]


def folds_by_split(contexts: Int[np.ndarray, "samples"], folds: int, rng: np.random.Generator) -> Folds:
    """Folds of all splits, drawn one after the other; refuses what `fold_numbers` refuses."""
    return {split: fold_numbers(split, contexts, folds, rng) for split in SPLITS}


def fit_by_split(features: Features, folds: Folds) -> BySplit:
    """Cross-validated probes at every site under every split; raises as `fit_sites` does."""
    samples, probes, picks, inner = [], [], {}, {}
    for split, numbers in folds.items():
        fits = fit_sites(features, split, numbers)
        best = chosen(fits, numbers)
        columns = {
            "sample": range(len(numbers)),
            "context": features.contexts,
            "accuracy": best.predicted.eq(features.labels).double().mean(0).numpy(),
            "bits": best.information.double().numpy(),
        }
        samples.append(pd.DataFrame({"split": split, **columns}))
        probes.append(fits.accuracies(features.labels, features.contexts, split=split))
        picks[split], inner[split] = best.picks, fits.inner_accuracy
    read, accuracies = (pd.concat(parts, ignore_index=True) for parts in (samples, probes))
    return BySplit(read, accuracies, picked_sites(picks), features.family_sites, inner)


def picked_sites(picks: Mapping[str, Sequence[tuple[Family, Site]]]) -> pd.DataFrame:
    """One row per `split` and test `fold`: the `family`, `layer`, `head` and `read` of the site that it chose."""
    return pd.DataFrame(
        [
            {"split": split, "fold": fold, "family": family, **site._asdict()}
            for split, of_folds in picks.items()
            for fold, (family, site) in enumerate(of_folds)
        ]
    )
