"""Verdicts: a component is called filter or poison only if its interval excludes zero in several kinds of damage."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.errors import UserError
from kvprobe.patching.metrics import LEAST
from kvprobe.stats import Estimate, interval, ratio

LEAST_FAMILIES = 2
COMPONENT = ("kind", "layer", "head", "band")
"""The columns of `LayerMap.df` that name a component or band."""


def verdicts(
    maps: Any,
    by: Sequence[str] | None = None,
    *,
    family: str = "family",
    cluster: str = "prompt",
    least: int = LEAST_FAMILIES,
) -> pd.DataFrame:
    """One row per component or band: π in each family with a 95 % interval over clusters, and what it may be called.

    π of several prompts is 1 − Σ restored / Σ damage, so that a prompt that was hardly damaged hardly counts. The
    `verdict` is

    - `poison` (or `filter`) if the interval lies above (below) zero in at least `least` families and on the other side
      in none,
    - `mixed` if it lies above zero in some family and below zero in another,
    - `unknown` if fewer than `least` families have an interval, which takes `stats.FEWEST` prompts each (with fewer,
      `low_…` and `high_…` are NaN, and `smallest_…` and `largest_…` are the range over prompts),
    - `neutral` otherwise.

    Args:
        maps: tables of `LayerMap.df`, one below the other, with columns for the family of the damage and the prompt;
            rows without a number do not count.
        by: the columns that name a component; of `COMPONENT` those that there are by default.

    Raises:
        UserError: fewer families than a verdict needs, or one that does hardly any damage.
    """
    by = list(maps.columns.intersection(COMPONENT)) if by is None else list(by)
    maps = maps.dropna(subset=["damage", "restored"])
    families = list(dict.fromkeys(maps[family]))
    if len(families) < least:
        raise UserError(f"A verdict needs {least} families of damage, but there are {len(families)}; run more faults.")
    for name in families:
        mean = float(maps.loc[maps[family] == name, "damage"].mean())
        if not mean >= LEAST:
            raise UserError(
                f"Damage {name!r} is {mean:.1e} nats on average, too little for its shares to mean anything; raise "
                "its rate, or leave it out."
            )
    rows = []
    for names, component in maps.groupby(by, sort=False, dropna=False):
        by_family = {name: component[component[family] == name].groupby(cluster) for name in families}
        pis = {name: _pi(clusters[["damage", "restored"]].sum()) for name, clusters in by_family.items()}
        rows.append(dict(zip(by, names, strict=True)) | _row(pis, least))
    return pd.DataFrame(rows)


def by_chance(
    maps: Any,
    by: Sequence[str] | None = None,
    *,
    family: str = "family",
    cluster: str = "prompt",
    least: int = LEAST_FAMILIES,
    seed: int = 0,
    flips: int = 400,
    comparisons: int = 1,
) -> pd.DataFrame:
    """How many components of each `by[0]` would be called filter or poison by chance: `mean`, and `high`, which 5 % of
    the draws exceed (5 % / `comparisons`, where a claim is picked from several counts).

    The effects of a prompt change sign at random, in all families and components together, so that their correlation
    stays: families damage the same prompts and components see the same damage, so verdicts by chance come in clusters.
    """
    by = list(maps.columns.intersection(COMPONENT)) if by is None else list(by)
    rng = np.random.default_rng([seed, 1])
    damage = maps.drop_duplicates([family, cluster]).pivot(index=cluster, columns=family, values="damage").fillna(0)
    index = [maps[family], maps[cluster], *(maps[name] for name in by)]
    gained = (maps["damage"] - maps["restored"]).groupby(index, dropna=False, sort=False).sum()
    gained = gained.unstack([0, *range(2, 2 + len(by))]).fillna(0)
    keys = gained.columns.to_frame(index=False)
    components = pd.MultiIndex.from_frame(keys[by]).factorize()[0]
    kinds = keys.assign(component=components).drop_duplicates("component").sort_values("component")[by[0]].to_numpy()
    effects, places = gained.loc[damage.index].to_numpy(float), damage.columns.get_indexer(keys[family])
    total = damage.to_numpy(float)[:, places]
    counts = []
    for _ in range(flips):
        flipped = rng.choice([-1.0, 1.0], (len(damage), 1)) * effects
        low, high = _ends(flipped, total)
        above, below = np.bincount(components, low > 0), np.bincount(components, high < 0)
        called = ((above >= least) & (below == 0)) | ((below >= least) & (above == 0))
        counts.append([int(called[kinds == kind].sum()) for kind in dict.fromkeys(kinds)])
    table = np.array(counts)
    highest = np.quantile(table, 1 - 0.05 / comparisons, axis=0)
    return pd.DataFrame({by[0]: list(dict.fromkeys(kinds)), "mean": table.mean(0), "high": highest})


def _ends(top: np.ndarray, bottom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the interval of each column's pooled share, clusters first."""
    left = bottom.sum(0) - bottom
    without = np.divide(top.sum(0) - top, left, out=np.full(top.shape, np.nan), where=left > 0)
    return interval(top.sum(0) / bottom.sum(0), without.T, weights=bottom.T)


def _pi(sums: pd.DataFrame) -> Estimate:
    """π over clusters, from the sums of damage and of restored damage of each."""
    damage, restored = (sums[column].to_numpy(float) for column in ("damage", "restored"))
    return ratio(damage - restored, damage)


def _row(pis: Mapping[str, Estimate], least: int) -> dict[str, float | str]:
    """π of each family in columns, and the verdict."""
    row: dict[str, float | str] = {}
    for name, pi in pis.items():
        row |= {f"pi_{name}": pi.mean, f"low_{name}": pi.low, f"high_{name}": pi.high}
        row |= {f"smallest_{name}": pi.smallest, f"largest_{name}": pi.largest}
    above, below = (sum(sides) for sides in zip(*((pi.above(), pi.below()) for pi in pis.values()), strict=True))
    known = sum(pi.has_interval for pi in pis.values())
    verdict = _verdict(above, below, least) if known >= least else "unknown"
    return row | {
        "above": above,
        "below": below,
        "verdict": verdict,
        "pi": float(np.mean([pi.mean for pi in pis.values()])),
    }


def _verdict(above: int, below: int, least: int) -> str:
    if above and below:
        return "mixed"
    if above >= least:
        return "poison"
    return "filter" if below >= least else "neutral"
