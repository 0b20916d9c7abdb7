"""Bands: the smallest run of adjacent layers whose single-layer effects (means over pairs, summed over segments) add up
to most of what those of all layers add up to.

Found on some pairs, a band is to be patched at once on others.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from kvprobe.tidy import Rows

SHARE = 0.8
"""Of the summed effects that a band must hold."""
FEWEST = 4
"""Clusters of pairs from which bands are found: two in each half."""

Bands = Mapping[str, Mapping[int, range]]
"""By part and half: the layers found on that half."""


def profile(cells: Rows, part: str, n_layers: int) -> Float[np.ndarray, "layers"]:
    """What swapping one part of each single layer does, pooled over pairs and summed over segments: the share of the
    way.

    Args:
        cells: single layers, as `kvprobe.patching.pairs.table_of` gives them.
    """
    of_part = cells[cells["part"] == part]
    ways = of_part.drop_duplicates("pair")["way"].sum()
    effects = of_part.groupby(of_part["layer"].astype(int))["effect"].sum() / ways
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


def bands_by_half(cells: Rows, n_layers: int, fewest: int = FEWEST) -> Bands:
    """The bands of K and of V on each half of the pairs. None of a part where the effects on a half add up to none
    toward the donor, and none at all of one half alone or of too few clusters.

    Args:
        cells: single layers, as `kvprobe.patching.pairs.table_of` gives them, with the number of a `half`.
        fewest: clusters.
    """
    halves = [int(half) for half in sorted(cells["half"].unique())]
    if cells["cluster"].nunique() < fewest or len(halves) < 2:
        return {}
    bands: dict[str, dict[int, range]] = {}
    for part in ("K", "V"):
        found = {half: band_of(profile(cells[cells["half"] == half], part, n_layers)) for half in halves}
        known = {half: band for half, band in found.items() if band is not None}
        if len(known) == len(halves):
            bands[part] = known
    return bands
