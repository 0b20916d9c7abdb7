"""When a component may be called filter or poison: only if an interval says so in several kinds of damage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.layers.layer_map import LEAST
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
        ValueError: fewer families than a verdict needs, or one that does hardly any damage.
    """
    families = list(dict.fromkeys(maps[family]))
    if len(families) < least:
        raise ValueError(f"A verdict needs {least} families of damage, but there are {len(families)}; run more faults.")
    for name in families:
        mean = float(maps.loc[maps[family] == name, "damage"].mean())
        if not mean >= LEAST:
            raise ValueError(
                f"Damage {name!r} makes {mean:.1e} nats on average, of which no share means anything; raise its rate, or leave it out."
            )
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


def by_chance(
    maps: Any,
    by: Sequence[str] = ("kind", "layer", "head"),
    *,
    family: str = "family",
    cluster: str = "prompt",
    least: int = LEAST_FAMILIES,
    seed: int = 0,
    flips: int = 200,
    resamples: int = 400,
) -> pd.DataFrame:
    """How many components of each `by[0]` would be called filter or poison if none were: `mean`, and `high`, which 5 % exceed.

    Each prompt's effects change sign or not, all families and components at once, so that what they share stays shared: families
    strike the same prompts and components see the same damage, and verdicts by chance come in swarms.
    """
    rng = np.random.default_rng([seed, 1])
    damage = maps.drop_duplicates([family, cluster]).pivot(index=cluster, columns=family, values="damage").fillna(0)
    index = [maps[family], maps[cluster], *(maps[name] for name in by)]
    gained = (maps["damage"] - maps["restored"]).groupby(index, dropna=False, sort=False).sum()
    gained = gained.unstack([0, *range(2, 2 + len(by))]).fillna(0)
    keys = gained.columns.to_frame(index=False)
    components = pd.MultiIndex.from_frame(keys[list(by)]).factorize()[0]
    kinds = keys.assign(component=components).drop_duplicates("component").sort_values("component")[by[0]].to_numpy()
    effects, places = gained.loc[damage.index].to_numpy(float), damage.columns.get_indexer(keys[family])
    weights = cluster_weights(len(damage), rng, resamples)
    total = (weights @ damage.to_numpy(float))[:, places]
    total = np.where(total > 0, total, np.nan)
    counts = []
    for _ in range(flips):
        flipped = (weights * rng.choice([-1.0, 1.0], len(damage))) @ effects / total
        low, high = np.nanpercentile(flipped, [2.5, 97.5], axis=0)
        above, below = np.bincount(components, low > 0), np.bincount(components, high < 0)
        called = ((above >= least) & (below == 0)) | ((below >= least) & (above == 0))
        counts.append([int(called[kinds == kind].sum()) for kind in dict.fromkeys(kinds)])
    table = np.array(counts)
    columns = {by[0]: list(dict.fromkeys(kinds)), "mean": table.mean(0), "high": np.percentile(table, 95, axis=0)}
    return pd.DataFrame(columns)


def _pooled(table: Any, clusters: np.ndarray, weights: np.ndarray) -> tuple[float, float, float]:
    damage, restored = (
        np.bincount(clusters, table[name].to_numpy(float), minlength=weights.shape[1])
        for name in ("damage", "restored")
    )
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
