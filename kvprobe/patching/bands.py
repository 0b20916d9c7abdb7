"""Bands: the smallest run of adjacent layers whose single-layer effects (means over pairs, summed over segments) add up
to most of what those of all layers add up to.

Found on some pairs, a band is to be patched at once on others.
"""

import numpy as np
from jaxtyping import Float

from kvprobe.tidy import Rows

SHARE = 0.8
"""Of the summed effects that a band must hold."""


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
