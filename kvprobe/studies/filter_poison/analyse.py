"""From maps to numbers: which components may be called filter or poison, and whether heads with a high or low index on
some conversations have it on others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.layers import Component, by_chance, verdicts
from kvprobe.layers.layer_map import LEAST
from kvprobe.stats import DIFFERENCE, estimate, jackknife, leave_one_out, ratio
from kvprobe.studies.filter_poison.collect import LOOKS, NONE, Heads
from kvprobe.studies.filter_poison.config import Config

POISON, FILTER = "poison", "filter"
MATCHED = " (random)"
"""Added to the name of a set of heads: others of the same layers."""
BY = ("kind", "layer", "head", "band")
CLAIMS = 5
"""Of the headline: verdicts on three kinds of component, and two sets of heads tested. What decides them holds
together."""


def called(maps: Any, config: Config) -> Any:
    """Every component and band: π in each family with intervals, the mean of the families, and the verdict."""
    return verdicts(maps[maps["family"] != NONE], BY)


def heads_by_half(maps: Any, config: Config) -> dict[int, Heads]:
    """The heads with the highest and the lowest mean index on each half, and random heads of the same layers.

    Indices are means over families, so that no family decides alone; a head need not have a verdict.
    """
    found: dict[int, Heads] = {}
    known = maps[(maps["family"] != NONE) & (maps["kind"] == "head")]
    for half in sorted(known["half"].unique()):
        mean = called(known[known["half"] == half], config).set_index(["layer", "head"])["pi"].sort_values()
        top = min(config.top, len(mean) // 2)
        every = [Component("head", int(layer), int(head)) for layer, head in mean.index]
        chosen = {POISON: every[-top:], FILTER: every[:top]}
        rng = np.random.default_rng([config.seed, 2, int(half)])
        taken = {*chosen[POISON], *chosen[FILTER]}
        sets: dict[str, list[list[Component]]] = {}
        for name, heads in chosen.items():
            sets[name] = [heads]
            sets[name + MATCHED] = [_matched(heads, every, taken, rng) for _ in range(config.random)]
        found[int(half)] = sets
    return found


def _matched(
    heads: Sequence[Component], every: Sequence[Component], taken: set[Component], rng: np.random.Generator
) -> list[Component]:
    """As many heads of each layer, none of which was chosen while there are others."""
    found: list[Component] = []
    for layer in dict.fromkeys(head.layer for head in heads):
        count = sum(head.layer == layer for head in heads)
        others = [head for head in every if head.layer == layer and head not in taken]
        spare = [head for head in every if head.layer == layer and head in taken]
        others = [others[place] for place in rng.permutation(len(others))] + [
            spare[place] for place in rng.permutation(len(spare))
        ]
        found += others[:count]
    return found


def analyse(maps: Any, states: Any, heads: Any, by_half: Mapping[int, Heads], config: Config) -> dict[str, Any]:
    """All numbers of a run."""
    names = list(config.rates)
    verdict = called(maps, config)
    single = verdict[verdict["kind"] != "band"]
    control = maps.loc[maps["family"] == NONE, ["damage", "restored", "noised"]]
    whole = maps[(maps["kind"] == "band") & (maps["family"] != NONE)].groupby(["prompt", "family"]).tail(1)
    whole = whole[whole["damage"] >= LEAST]
    chance = by_chance(maps[(maps["family"] != NONE) & (maps["kind"] != "band")], seed=config.seed, comparisons=CLAIMS)
    layers = int(maps["layer"].max()) + 1
    return {
        "families": names,
        "prompts": int(maps["prompt"].nunique()),
        "n_layers": layers,
        "n_heads": int(maps["head"].max()) + 1,
        "damage": [_damage(maps, name) for name in names],
        "components": _records(single),
        "bands": _records(verdict[verdict["kind"] == "band"]),
        "noised": _noised(maps),
        "counts": [
            {
                "kind": kind,
                "verdict": name,
                "count": int(((single["kind"] == kind) & (single["verdict"] == name)).sum()),
            }
            for kind in ("attn", "mlp", "head")
            for name in (POISON, FILTER, "mixed", "neutral")
        ],
        "by_chance": {row["kind"]: {"mean": row["mean"], "high": row["high"]} for row in chance.to_dict("records")},
        "states": _states(states, names),
        "baselines": _baselines(single, states),
        "looks": _looks(maps, names),
        "tested": _tested(heads, names),
        "top": len(by_half[0][POISON][0]),
        "overlap": _overlap(by_half),
        "shared": _shared(by_half),
        "controls": {
            "undamaged": float(control.abs().max().max()),
            "everything": float((whole["restored"] / whole["damage"]).abs().max()),
        },
    }


def _records(table: Any) -> list[dict[str, Any]]:
    """Rows as JSON holds them: what is missing is None."""
    return [
        {
            name: None if pd.isna(value) else (int(value) if name in ("layer", "head") else value)
            for name, value in row.items()
        }
        for row in table.to_dict("records")
    ]


def _damage(maps: Any, family: str) -> dict[str, Any]:
    own = maps[maps["family"] == family].drop_duplicates("prompt")["damage"].to_numpy(float)
    return {"family": family, **estimate(own).record(), "median": float(np.median(own))}


def _noised(maps: Any) -> list[dict[str, Any]]:
    """The share of the damage that the damaged outputs of one band alone bring into the clean run."""
    own = maps[(maps["kind"] == "band") & (maps["family"] != NONE)]
    sums = own.groupby(["band", "family"], sort=False)[["noised", "damage"]].sum().reset_index()
    return [
        {"band": row["band"], "family": row["family"], "share": row["noised"] / row["damage"]}
        for row in sums.to_dict("records")
    ]


def _states(states: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """By family and layer: medians over conversations, because a ratio of small numbers has wild means."""
    columns = ["rho", "rho_after", "gain", "erasure", "erasure_attn", "erasure_mlp", "angle", "drop"]
    known = states[states["family"].isin(names)]
    table = known.groupby(["family", "layer"], sort=False)[columns].median().reset_index()
    return _records(table)


def _baselines(single: Any, states: Any) -> dict[str, float]:
    """Rank correlations over layers of what is measured without damage with the mean index of attention and of MLP."""
    clean = states[states["family"] == NONE].groupby("layer")[["angle", "drop"]].median()
    found = {}
    for kind in ("attn", "mlp"):
        own = single[single["kind"] == kind].set_index("layer")["pi"]
        for name in ("angle", "drop"):
            found[f"{name}_{kind}"] = float(own.rank().corr(clean[name].rank()))
    return found


def _looks(maps: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rank correlation over heads of what they do with struck slots with their index, and the same within layers."""
    found = []
    for family in names:
        own = maps[(maps["family"] == family) & (maps["kind"] == "head")]
        wide = own.pivot(index="prompt", columns=["layer", "head"], values=["damage", "restored", *LOOKS])
        layers = wide["damage"].columns.get_level_values("layer").to_numpy(int)
        weights = np.concatenate([np.ones((1, len(wide)), int), leave_one_out(len(wide))])
        damage, restored = (weights @ wide[name].to_numpy(float) for name in ("damage", "restored"))
        index = 1 - restored / damage
        for look in LOOKS:
            # Where the clean run gave the slots nothing, a head has no lift.
            values = wide[look].to_numpy(float)
            there = np.isfinite(values)
            with np.errstate(invalid="ignore"):
                means = (weights @ np.where(there, values, 0.0)) / (weights @ there)
            entry: dict[str, Any] = {"family": family, "look": look}
            for name, within in (("all", None), ("within", layers)):
                each = np.array([_rank_correlation(one, two, within) for one, two in zip(means, index, strict=True)])
                if not np.isfinite(each[0]):
                    entry[name] = None  # all heads alike
                    continue
                entry[name] = jackknife(float(each[0]), each[1:], DIFFERENCE).record()
            found.append(entry)
    return found


def _rank_correlation(one: np.ndarray, two: np.ndarray, within: np.ndarray | None) -> float:
    """Spearman's; with `within`, of ranks from which the mean of each group is taken."""
    known = np.isfinite(one) & np.isfinite(two)
    ranks: Any = pd.DataFrame({"one": one[known], "two": two[known]}).rank()
    if within is not None:
        ranks -= ranks.groupby(within[known]).transform("mean")
    return float(ranks["one"].corr(ranks["two"]))


def _tested(heads: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The index of each set on the half that it was not found on, that of random heads, and the difference."""
    prompts = {name: number for number, name in enumerate(dict.fromkeys(heads["prompt"]))}
    weights = np.concatenate([np.ones((1, len(prompts)), int), leave_one_out(len(prompts))])
    found = []
    for family in (*names, "all"):
        own = heads if family == "all" else heads[heads["family"] == family]
        # Every family counts alike, and every conversation of it by its damage.
        scale = own.groupby("family")["damage"].transform("mean")
        own = own.assign(damage=own["damage"] / scale, restored=own["restored"] / scale)
        for sort in (POISON, FILTER):
            chosen, random = (_summed(own[own["sort"] == name], prompts) for name in (sort, sort + MATCHED))
            entry: dict[str, Any] = {"family": family, "sort": sort}
            indices = []
            for name, (damage, restored) in (("chosen", chosen), ("random", random)):
                entry[name] = ratio(damage - restored, damage).record()
                # With every conversation, and then without each of them.
                left = weights @ damage
                indices.append(1 - np.divide(weights @ restored, left, out=np.full(len(left), np.nan), where=left > 0))
            difference = indices[0] - indices[1]
            entry["difference"] = jackknife(float(difference[0]), difference[1:], comparisons=CLAIMS).record()
            sums = own[own["sort"] == sort + MATCHED].groupby("draw")[["damage", "restored"]].sum()
            each = 1 - sums["restored"] / sums["damage"]
            as_far = each >= entry["chosen"]["mean"] if sort == POISON else each <= entry["chosen"]["mean"]
            entry |= {"as_far": int(as_far.sum()), "sets": len(sums)}
            found.append(entry)
    return found


def _summed(table: Any, prompts: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Damage and what is left of it, by conversation."""
    numbers = table["prompt"].map(prompts).to_numpy()
    damage, restored = (
        np.bincount(numbers, table[name].to_numpy(float), len(prompts)) for name in ("damage", "restored")
    )
    return damage, restored


def _overlap(by_half: Mapping[int, Heads]) -> dict[str, int]:
    """Heads that both halves chose."""
    halves = list(by_half.values())
    return {
        name: len({*halves[0][name][0]} & {*halves[-1][name][0]}) if len(halves) > 1 else 0 for name in (POISON, FILTER)
    }


def _shared(by_half: Mapping[int, Heads]) -> dict[str, float]:
    """The share of the random heads that are of those with the highest or lowest index, for want of others in their
    layer."""
    found = {}
    for name in (POISON, FILTER):
        taken = [
            head in {*sets[POISON][0], *sets[FILTER][0]}
            for sets in by_half.values()
            for group in sets[name + MATCHED]
            for head in group
        ]
        found[name] = float(np.mean(taken))
    return found
