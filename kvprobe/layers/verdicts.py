"""When a component may be called filter or poison: only if an interval says so in several kinds of damage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.stats import cluster_weights

LEAST_FAMILIES = 2


def verdicts(
    maps: Any,
    by: Sequence[str] = ("kind", "layer", "head"),
    *,
    family: str = "family",
    cluster: str = "prompt",
    least: int = LEAST_FAMILIES,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per component: π in each family with a 95 % interval over clusters, and what it may be called.

    π of several prompts is 1 − Σ restored / Σ damage, so that a prompt that was hardly damaged hardly counts. `verdict` is
    `poison` (or `filter`) if the interval lies above (below) zero in at least `least` families and on the other side in none,
    `mixed` if it lies on both sides, each in some family, and `neutral` otherwise.

    Args:
        maps: tables of `LayerMap.df`, one below the other, with columns that tell the family of the damage and the prompt.

    Raises:
        ValueError: fewer families than a verdict needs.
    """
    families = list(dict.fromkeys(maps[family]))
    if len(families) < least:
        raise ValueError(f"A verdict needs {least} families of damage, but there are {len(families)}; run more faults.")
    prompts = {name: number for number, name in enumerate(dict.fromkeys(maps[cluster]))}
    weights = cluster_weights(len(prompts), np.random.default_rng(seed))
    found = []
    for names, own in maps.groupby(list(by), sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(by, names, strict=True))
        signs = []
        for each in families:
            of = own[own[family] == each]
            pi, low, high = _pooled(of, of[cluster].map(prompts).to_numpy(), weights)
            row |= {f"pi_{each}": pi, f"low_{each}": low, f"high_{each}": high}
            signs.append(1 if low > 0 else -1 if high < 0 else 0)
        above, below = signs.count(1), signs.count(-1)
        row |= {"above": above, "below": below, "verdict": _verdict(above, below, least)}
        row["pi"] = float(np.mean([row[f"pi_{each}"] for each in families]))
        found.append(row)
    return pd.DataFrame(found)


def by_chance(components: int, families: int, least: int = LEAST_FAMILIES) -> float:
    """How many components would be called filter or poison if none were either, and families were independent."""
    ways = np.zeros(families + 1)
    ways[0] = 1
    for _ in range(families):  # of the one sign, each with 2.5 %
        ways[1:] = ways[1:] * 0.975 + ways[:-1] * 0.025
        ways[0] *= 0.975
    return 2 * components * float(ways[least:].sum())


def _pooled(table: Any, clusters: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    damage, restored = (
        np.bincount(clusters, table[name].to_numpy(float), minlength=weights.shape[1])
        for name in ("damage", "restored")
    )
    if not damage.sum():
        return np.nan, np.nan, np.nan
    drawn = weights @ damage
    resampled = 1 - (weights @ restored)[drawn > 0] / drawn[drawn > 0]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return 1 - restored.sum() / damage.sum(), float(low), float(high)


def _verdict(above: int, below: int, least: int) -> str:
    if above and below:
        return "mixed"
    if above >= least:
        return "poison"
    return "filter" if below >= least else "neutral"
