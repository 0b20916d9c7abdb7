"""From rows to numbers: what noise costs in each band, which bands differ significantly, and whether another scale
agrees."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb, inf
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvprobe.experiments.reported import Reported, reported
from kvprobe.stats import DIFFERENCE, UNBOUNDED, Estimate, wilson
from kvprobe.studies.bands.collect import CONTROL, CUTS, SINGLES, names_of
from kvprobe.studies.bands.config import BANDS, NOISES, PARTS, Config
from kvprobe.studies.bands.measured import Measured, Range, mean_of, statistic
from kvprobe.tasks.task import Task, rankable, too_hard
from kvprobe.wording import estimate_of

POSITIVE: Range = (0.0, inf)
LAST, BUFFER = "quarter 4", "quarter 3"
"""Canarypwn's article finds the last quarter the most sensitive, and calls the third a buffer."""
SPLITS = 200
"""Halvings of the items behind each self-agreement."""
FEWEST_TO_HALVE = 6
"""Items below which halves of them say nothing of how well a noise agrees with itself."""


def analyse(table: Any, config: Config, tasks: Sequence[Task]) -> dict[str, Any]:
    """The numbers of a run, task by task."""
    control = table[table["group"] == CONTROL]
    beside = reported(config.reported) if config.reported else None
    return {
        "layers": int(control["last"].max()) + 1,
        "bands": _layers_of(table[table["group"] == CUTS]),
        "tasks": [_task(table[table["task"] == task.name], config, task, beside, len(tasks)) for task in tasks],
    }


def _layers_of(rows: Any) -> dict[str, list[int]]:
    found = rows.drop_duplicates("band")
    return {str(row["band"]): [int(row["first"]), int(row["last"])] for row in found.to_dict("records")}


def _task(rows: Any, config: Config, task: Task, beside: Reported | None, tasks: int) -> dict[str, Any]:
    measured = Measured.of(rows)
    accuracy = float(measured.clean.mean())
    judged = rankable(accuracy, task.chance)
    measures = [name for name, is_there in (("kl", config.follow), ("lost", judged)) if is_there]
    cells = [_cell(measured, case) for case in range(len(measured.cases))]
    clean = rows[rows["case"] < 0]
    found = {
        "task": task.name,
        "scorer": task.scorers[0],
        "chance": float(task.chance),
        "items": measured.items,
        "slots": [int(clean["slots"].min()), int(clean["slots"].max())],
        "clean": wilson(float(measured.clean.sum()), measured.items).record(),
        "judged": judged,
        "too_hard": too_hard(task.name, accuracy, task.chance),
        "control": _control(rows[rows["group"] == CONTROL]),
        "broken": _broken(rows),
        "cells": [cell for cell in cells if cell["group"] != CONTROL],
        "orders": _orders(measured, config, measures, tasks),
        "last_against_others": _last_against_others(measured, config),
        "agreement": _agreement(measured, config),
        "self_agreement": _self_agreement(measured, config),
        "keys_against_values": _keys_against_values(measured, config, measures),
    }
    if beside is not None and task.name.partition(":")[0] == beside.task:
        found["published"] = _beside(beside, found)
    return found


def _cell(measured: Measured, case: int) -> dict[str, Any]:
    labels = measured.cases[case]
    items = measured.items
    return {
        "group": str(labels["group"]),
        "band": str(labels["band"]),
        "first": int(labels["first"]),
        "last": int(labels["last"]),
        "noise": str(labels["noise"]),
        "parts": str(labels["parts"]),
        "rate": float(labels["rate"]),
        "accuracy": wilson(float(measured.right[case].sum()), items).record(),
        "lost": mean_of(measured.lost[case], DIFFERENCE),
        "kl": mean_of(measured.kl[case]),
        "same": wilson(float(measured.same[case].sum()), items).record(),
        "broken": int(measured.broken[case].sum()),
    }


def _control(rows: Any) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "struck": int(rows["struck"].sum()),
        "same": int(rows["same"].sum()),
        "kl": None if rows["kl"].isna().all() else float(rows["kl"].max()),
    }


def _broken(rows: Any) -> dict[str, Any]:
    broken = rows[rows["broken"] != ""]
    return {"rows": len(broken), "of": len(rows), "first": str(broken["broken"].iloc[0]) if len(broken) else None}


def conditions(config: Config) -> list[tuple[str, str]]:
    """Each noise with each part, in a fixed order whatever the config's."""
    return [(noise, part) for part in PARTS if part in config.parts for noise in NOISES if noise in config.noises]


def together(config: Config) -> list[float | None]:
    """The rates, and None for all of them together."""
    return [*config.rates, None]


def band_names(config: Config, cut: str) -> list[str]:
    """The names of a cut's bands; none if the config has no such cut."""
    return names_of(cut) if cut in config.bands else []


def _orders(measured: Measured, config: Config, measures: Sequence[str], tasks: int) -> list[dict[str, Any]]:
    """The bands of each cut, most sensitive first, and which of them differ. The headline picks from the pairs under
    every noise on every task: their intervals hold together."""
    found = []
    noises = len({noise for noise, _ in conditions(config)})
    for cut in ("quarters", "halves"):
        names = band_names(config, cut)
        claims = comb(len(names), 2) * noises * tasks
        for noise, parts in conditions(config) if names else []:
            for rate in together(config):
                for measure in measures:
                    values = {
                        name: measured.pick(
                            getattr(measured, measure), group=CUTS, band=name, noise=noise, parts=parts, rate=rate
                        )
                        for name in names
                    }
                    order = order_of(values, DIFFERENCE if measure == "lost" else UNBOUNDED, claims)
                    if order is not None:
                        known = {"cut": cut, "noise": noise, "parts": parts, "rate": rate, "measure": measure}
                        found.append(known | order)
    return found


def order_of(
    values: Mapping[str, Float[np.ndarray, "items"]], within: Range = UNBOUNDED, comparisons: int = 1
) -> dict[str, Any] | None:
    """Bands by their mean, largest first, with the paired difference of each two; None where a mean is not known."""
    means = {name: mean_of(each, within) for name, each in values.items()}
    if any(mean is None for mean in means.values()):
        return None
    order = sorted(values, key=lambda name: -float(np.nanmean(values[name])))
    pairs = [
        {"more": more, "less": less, "difference": mean_of(values[more] - values[less], within, comparisons)}
        for more, less in combinations(order, 2)
    ]
    return {
        "bands": [{"band": name, "mean": means[name]} for name in order],
        "pairs": pairs,
        "last_most": verdict(pairs, "more", LAST),
        "buffer_least": verdict(pairs, "less", BUFFER),
    }


def told(pair: Mapping[str, Any]) -> bool:
    """Whether a pair's difference is significantly above zero."""
    return pair["difference"] is not None and estimate_of(pair["difference"]).above()


def verdict(pairs: Sequence[Mapping[str, Any]], side: str, band: str) -> str:
    """Whether a band is the extreme one on this side (`more` or `less`) of every pair: `yes`, significantly from all
    others; `no`, another is significantly beyond it; else `open`."""
    other = "less" if side == "more" else "more"
    if any(pair[other] == band and told(pair) for pair in pairs):
        return "no"
    mine = [pair for pair in pairs if band in (pair["more"], pair["less"])]
    return "yes" if mine and all(pair[side] == band and told(pair) for pair in mine) else "open"


def _last_against_others(measured: Measured, config: Config) -> list[dict[str, Any]]:
    """How many times the mean KL of the other quarters the last one has, all rates together, and by what factor that is
    larger than under noise at the layer's scale."""
    names = band_names(config, "quarters")
    if not names or not config.follow:
        return []

    def quarters(noise: str, parts: str) -> Float[np.ndarray, "quarters items"]:
        picked = [measured.pick(measured.kl, group=CUTS, band=name, noise=noise, parts=parts) for name in names]
        return np.stack(picked)

    def ratio(means: Float[np.ndarray, "draws quarters"]) -> Float[np.ndarray, "draws"]:
        last = names.index(LAST)
        with np.errstate(divide="ignore", invalid="ignore"):
            return means[:, last] / np.delete(means, last, axis=1).mean(1)

    found = []
    for noise, parts in conditions(config):
        mine = quarters(noise, parts)
        against = None
        if noise != "layer" and ("layer", parts) in conditions(config):
            against = statistic(
                [mine, quarters("layer", parts)], lambda own, layer: ratio(own) / ratio(layer), POSITIVE
            )
        found.append({"noise": noise, "parts": parts, "ratio": statistic([mine], ratio, POSITIVE), "change": against})
    return found


def _singles(measured: Measured, noise: str, parts: str) -> Float[np.ndarray, "layers items"]:
    wanted = {"group": SINGLES, "noise": noise, "parts": parts}
    layers = {case["first"]: place for place, case in enumerate(measured.cases) if wanted.items() <= case.items()}
    return measured.kl[[layers[layer] for layer in sorted(layers)]]


def _agreement(measured: Measured, config: Config) -> list[dict[str, Any]]:
    """Spearman's correlation across single layers between the mean KL under two noises."""
    if not config.single or not config.follow:
        return []
    found = []
    for (noise, parts), (other, also) in combinations(conditions(config), 2):
        if parts == also:
            both = [_singles(measured, noise, parts), _singles(measured, other, parts)]
            found.append({"parts": parts, "noises": [noise, other], "rho": statistic(both, spearman, DIFFERENCE)})
    return found


def _self_agreement(measured: Measured, config: Config) -> list[dict[str, Any]]:
    """Spearman's correlation across single layers between halves of the items under one noise, the mean over
    halvings."""
    if not config.single or not config.follow:
        return []
    found = []
    rng = np.random.default_rng([config.seed, 1, 6])
    for noise, parts in conditions(config):
        singles = _singles(measured, noise, parts)
        singles = singles[:, np.isfinite(singles).all(0)]
        items = singles.shape[1]
        if items < FEWEST_TO_HALVE:
            continue
        orders = rng.permuted(np.tile(np.arange(items), (SPLITS, 1)), axis=1)
        halves = (orders[:, : items // 2], orders[:, items // 2 :])
        rho = spearman(*(singles[:, half].mean(-1).T for half in halves)).mean()
        if np.isfinite(rho):
            found.append({"noise": noise, "parts": parts, "rho": float(rho)})
    return found


def spearman(
    one: Float[np.ndarray, "draws layers"], other: Float[np.ndarray, "draws layers"]
) -> Float[np.ndarray, "draws"]:
    """Rank correlation across layers, draw by draw; not a number where all layers are equal."""
    ranks = [pd.DataFrame(each).rank(axis=1).to_numpy() for each in (one, other)]
    first, second = (each - each.mean(1, keepdims=True) for each in ranks)
    with np.errstate(invalid="ignore"):
        return (first * second).sum(1) / np.sqrt((first**2).sum(1) * (second**2).sum(1))


def _keys_against_values(measured: Measured, config: Config, measures: Sequence[str]) -> list[dict[str, Any]]:
    """What noise in K costs more than noise in V, in the same slots."""
    known = dict.fromkeys(noise for noise, _ in conditions(config))
    if not {"k", "v"} <= {parts for _, parts in conditions(config)}:
        return []
    bands = [(CUTS, band, rate) for cut in BANDS for band in band_names(config, cut) for rate in together(config)]
    if config.single:
        layers = sorted({case["first"] for case in measured.cases if case["group"] == SINGLES})
        bands += [(SINGLES, f"layer {layer:.0f}", config.single) for layer in layers]
    found = []
    for noise in known:
        for group, band, rate in bands:
            differences = {}
            for measure in measures:
                values = getattr(measured, measure)
                keys, others = (
                    measured.pick(values, group=group, band=band, noise=noise, parts=part, rate=rate)
                    for part in ("k", "v")
                )
                differences[measure] = mean_of(keys - others, DIFFERENCE if measure == "lost" else UNBOUNDED)
            found.append({"group": group, "band": band, "noise": noise, "rate": rate, "more": differences})
    return found


def _beside(table: Reported, task: Mapping[str, Any]) -> dict[str, Any]:
    """A reported table, and how far each of its accuracies is from the one that was measured."""
    cells = {
        (cell["band"], cell["rate"]): cell["accuracy"]
        for cell in task["cells"]
        if (cell["group"], cell["noise"], cell["parts"]) == (CUTS, "layer", "kv")
    }
    rows = []
    for band, accuracies in table.rows.items():
        for rate, accuracy in zip(table.rates, accuracies, strict=True):
            theirs = wilson(accuracy * table.samples, table.samples)
            mine = cells.get((band, rate))
            difference = None if mine is None else newcombe(estimate_of(mine), theirs).record()
            rows.append({"band": band, "rate": rate, "theirs": theirs.record(), "difference": difference})
    return {
        "name": table.name,
        "source": table.source,
        "model": table.model,
        "samples": table.samples,
        "clean": wilson(table.clean * table.samples, table.samples).record(),
        "clean_difference": newcombe(
            estimate_of(task["clean"]), wilson(table.clean * table.samples, table.samples)
        ).record(),
        "rows": rows,
    }


def newcombe(one: Estimate, other: Estimate) -> Estimate:
    """The difference of two independent shares, from their Wilson intervals (Newcombe 1998, method 10)."""
    difference = one.mean - other.mean
    below = ((one.mean - one.low) ** 2 + (other.high - other.mean) ** 2) ** 0.5
    above = ((one.high - one.mean) ** 2 + (other.mean - other.low) ** 2) ** 0.5
    smallest, largest = one.ends[0] - other.ends[1], one.ends[1] - other.ends[0]
    trials = min(one.clusters, other.clusters)
    return Estimate(difference, difference - below, difference + above, trials, smallest, largest)
