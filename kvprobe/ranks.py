"""Rank correlations, also within groups, and how well a ranking of means over items agrees with itself."""

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

SPLITS = 200
"""Halvings of the items behind each self-agreement."""
FEWEST_TO_HALVE = 6
"""Items below which halves of them say nothing of how well a noise agrees with itself."""


def spearman(
    one: Float[np.ndarray, "draws layers"], other: Float[np.ndarray, "draws layers"]
) -> Float[np.ndarray, "draws"]:
    """Rank correlation across layers, draw by draw; NaN where all layers are equal."""
    ranks = [pd.DataFrame(numbers).rank(axis=1).to_numpy() for numbers in (one, other)]
    first, second = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    with np.errstate(invalid="ignore"):
        return (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))


def rank_correlation(
    one: Float[np.ndarray, "items"], other: Float[np.ndarray, "items"], within: Int[np.ndarray, "items"] | None = None
) -> float:
    """Spearman's rank correlation over items that have both numbers; NaN where all of these are equal.

    Args:
        within: the group of each item, whose mean is taken from its ranks.
    """
    known = np.isfinite(one) & np.isfinite(other)
    ranks = pd.DataFrame({"one": one[known], "other": other[known]}).rank()
    if within is not None:
        ranks = ranks - ranks.groupby(within[known]).transform("mean")
    varied = bool((ranks.max() > ranks.min()).all())
    return float(ranks.corr().to_numpy()[0, 1]) if varied else np.nan


def halves_agree(layers: Float[np.ndarray, "layers items"], rng: np.random.Generator) -> float | None:
    """Rank correlation across layers between halves of the items, the mean over halvings; None of too few items."""
    layers = layers[:, np.isfinite(layers).all(0)]
    items = layers.shape[1]
    if items < FEWEST_TO_HALVE:
        return None
    orders = rng.permuted(np.tile(np.arange(items), (SPLITS, 1)), axis=1)
    halves = (orders[:, : items // 2], orders[:, items // 2 :])
    rho = float(spearman(*(layers[:, half].mean(-1).T for half in halves)).mean())
    return rho if np.isfinite(rho) else None
