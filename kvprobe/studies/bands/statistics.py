"""Statistics of means over items that are no means themselves."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvprobe.stats import Estimate, jackknife, leave_one_out

SPLITS = 200
"""Halvings of the items behind each self-agreement."""
FEWEST_TO_HALVE = 6
"""Items below which halves of them say nothing of how well a noise agrees with itself."""


def statistic(
    values: Sequence[Float[np.ndarray, "*axes items"]],
    say: Callable[..., Float[np.ndarray, "draws"]],
    within: tuple[float, float],
    comparisons: int = 1,
) -> Estimate | None:
    """What `say` makes of means over items, with its interval; None where it cannot be computed.

    Args:
        values: quantities, items last; only items at which all are known count, and they must be at least half.
        say: from means, draws first (all items, then all but each), to a number for each draw.
    """
    known = np.logical_and.reduce([np.isfinite(quantity).reshape(-1, quantity.shape[-1]).all(0) for quantity in values])
    count = int(known.sum())
    if 2 * count < len(known):
        return None
    weights = np.concatenate([np.ones((1, count), int), leave_one_out(count)])
    sizes = np.maximum(weights.sum(1), 1)
    means = [np.moveaxis(np.moveaxis(quantity[..., known], -1, 0).T @ weights.T / sizes, -1, 0) for quantity in values]
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = say(*means)
    if not np.isfinite(numbers[0]):
        return None
    # An item counts as much as it contributes to the means.
    parts = [np.abs(quantity[..., known]).reshape(-1, count).sum(0) for quantity in values]
    shares = np.sum([part / part.sum() for part in parts if part.sum()], axis=0)
    return jackknife(float(numbers[0]), numbers[1:], within, comparisons, shares)


def last_over_others(means: Float[np.ndarray, "draws bands"]) -> Float[np.ndarray, "draws"]:
    """The last band's mean over the mean of the others."""
    return means[:, -1] / means[:, :-1].mean(1)


def spearman(
    one: Float[np.ndarray, "draws layers"], other: Float[np.ndarray, "draws layers"]
) -> Float[np.ndarray, "draws"]:
    """Rank correlation across layers, draw by draw; NaN where all layers are equal."""
    ranks = [pd.DataFrame(numbers).rank(axis=1).to_numpy() for numbers in (one, other)]
    first, second = (rank - rank.mean(1, keepdims=True) for rank in ranks)
    with np.errstate(invalid="ignore"):
        return (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))


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
