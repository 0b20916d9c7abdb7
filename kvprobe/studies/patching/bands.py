"""Bands: the smallest run of adjacent layers whose single-layer effects (means over pairs, summed over segments) add up
to at least 80 % of what those of all layers add up to.

One is found on each half of the facts and then patched at once on the other.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

SHARE = 0.8
"""Of the summed effects that a band must hold."""
FEWEST = 4
"""Facts that the model must be able to do before anything is said of where they are read: two in each half."""

Bands = Mapping[str, Mapping[int, range]]
"""By part and half: the layers found on that half."""


def bands_by_half(cells: Any, n_layers: int) -> Bands:
    """The bands of K and of V on each half of the facts; none where a half has too few facts, or no effect toward the
    donor.

    Args:
        cells: single layers, of the runs that the model can do.
    """
    halves = [int(half) for half in sorted(cells["half"].unique())]
    if cells["cluster"].nunique() < FEWEST or len(halves) < 2:
        return {}
    bands: dict[str, dict[int, range]] = {}
    for part in ("K", "V"):
        found = {half: band_of(profile(cells[cells["half"] == half], part, n_layers)) for half in halves}
        if None not in found.values():
            bands[part] = {half: band for half, band in found.items() if band is not None}
    return bands


def profile(cells: Any, part: str, n_layers: int) -> Float[np.ndarray, "layers"]:
    """What swapping one part of each single layer does, pooled over pairs and summed over segments: the share of the
    way."""
    own = cells[cells["part"] == part]
    effects = own.groupby(own["layer"].astype(int))["effect"].sum() / own.drop_duplicates("pair")["way"].sum()
    return effects.reindex(range(n_layers), fill_value=0.0).to_numpy()


def band_of(effects: Float[np.ndarray, "layers"], share: float = SHARE) -> range | None:
    """The smallest run of layers that holds this share of the sum, the largest sum among equals; None if the sum is no
    effect toward the donor."""
    whole = float(effects.sum())
    if whole <= 0:
        return None
    sums = np.concatenate([[0.0], np.cumsum(effects)])
    for length in range(1, len(effects) + 1):
        runs = sums[length:] - sums[:-length]
        first = int(runs.argmax())
        if runs[first] >= share * whole:
            return range(first, first + length)
    return None
