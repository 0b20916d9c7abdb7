"""The tables of a probing: fits with their intervals beside floors and controls, one row per site, floor, reading or
k."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.probing.features import Features
from kvprobe.probing.fits import Fits
from kvprobe.probing.intervals import INFORMATION, held_out, held_out_means
from kvprobe.probing.sparse import eta_squared
from kvprobe.probing.splits import Split
from kvprobe.stats import DIFFERENCE, SHARE

Clusters = Int[np.ndarray, "samples"]


def site_table(
    split: Split,
    features: Features,
    fits: Fits,
    clusters: Clusters,
    *,
    floor: Fits | None,
    control: tuple[Fits, Int[Tensor, "tasks samples"]] | None,
) -> pd.DataFrame:
    """One row per site; the columns are those of `kvprobe.probing.claims.Probing.table` without permutations.

    Args:
        floor: the fits of the restart.
        control: fits and labels of the control tasks.
    """
    hits = fits.hits(features.labels)
    columns = _with_interval("bits", fits.information.double().numpy(), clusters, INFORMATION)
    columns["eta_squared"] = _mean_eta_squared(features, split)
    if control is not None:
        memorised = control[0].hits(control[1])
        columns["control"] = memorised.mean(1)
        columns |= _with_interval("selectivity", hits - memorised, clusters, DIFFERENCE)
    if floor is not None and floor.sites == fits.sites:
        floor_hits = floor.hits(features.labels)
        columns["floor"] = floor_hits.mean(1)
        columns |= _with_interval("leak", hits - floor_hits, clusters, DIFFERENCE)
        columns["leak_bits"] = (fits.information - floor.information).double().mean(1).numpy()
    return fits.accuracies(features.labels, clusters, split=split).assign(**columns)


def floor_table(
    split: Split, floors: Mapping[str, Fits], labels: Int[Tensor, "targets samples"], clusters: Clusters
) -> pd.DataFrame:
    """One row per floor and site."""
    tables = [fits.accuracies(labels, clusters, split=split, floor=name) for name, fits in floors.items()]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def summary_table(
    split: Split,
    right: Mapping[str, Bool[Tensor, "_ samples"]],
    bits: Mapping[str, Float[Tensor, "samples"]],
    clusters: Clusters,
) -> pd.DataFrame:
    """One row per reading: its accuracy and bits, and how far `retained` is above it."""
    shares = {reading: places.double().mean(0).numpy() for reading, places in right.items()}
    rows = []
    for reading, share in shares.items():
        estimates = {"accuracy": held_out(share, clusters, SHARE)}
        if reading in bits:
            estimates["bits"] = held_out(bits[reading].double().numpy(), clusters, INFORMATION)
        if reading != "retained":
            estimates["lead"] = held_out(shares["retained"] - share, clusters, DIFFERENCE)
        row: dict[str, str | float] = {"split": split, "reading": reading}
        for name, estimate in estimates.items():
            row |= estimate.columns(name)
        rows.append(row)
    return pd.DataFrame(rows)


def sparse_table(
    split: Split,
    curves: Mapping[int, tuple[Float[np.ndarray, "samples"], Float[np.ndarray, "samples"]]],
    clusters: Clusters,
) -> pd.DataFrame:
    """One row per k of `kvprobe.probing.curves.chosen_curves`."""
    rows = []
    for k, (best, random) in curves.items():
        accuracy, low, high = map(float, held_out_means(best, clusters, SHARE))
        rows.append({"split": split, "k": k, "accuracy": accuracy, "low": low, "high": high, "random": random.mean()})
    return pd.DataFrame(rows)


def _with_interval(
    name: str, values: Float[np.ndarray, "sites samples"], clusters: Clusters, within: tuple[float, float]
) -> dict[str, np.ndarray]:
    """Columns of a mean over samples and its interval."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), held_out_means(values, clusters, within), strict=True))


def _mean_eta_squared(features: Features, split: Split) -> Float[np.ndarray, "sites"]:
    """Share of variance between labels, mean over dimensions and places; for the paired split, of the variance within
    contexts."""
    contexts = features.contexts if split == "paired" else None
    shares = [
        eta_squared(seen, features.labels, len(features.target.classes), contexts=contexts).mean((1, 2))
        for seen, _ in features.batches("random")
    ]
    return torch.cat(shares).double().cpu().numpy()
