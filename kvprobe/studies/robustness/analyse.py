"""From answers to numbers: every fault at every rate against the same items on a sound cache, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float

from kvprobe.experiments.trial_settings import TIMINGS
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.stats import DIFFERENCE, UNBOUNDED, estimate, wilson
from kvprobe.studies.robustness.collect import (
    CONTROL,
    MAIN,
    NOT_A_NUMBER,
    PROCEDURE,
    PROCEDURE_UNITS,
)
from kvprobe.studies.robustness.config import Config
from kvprobe.tasks.task import Task, rankable, too_hard

Rows = Any
"""A table; pandas says too little of what selecting from one gives."""

CONTRASTS = {
    ("gaussian", "zeros"): "noise at the layer's own scale against zeros",
    ("zeros", "distractor"): "zeros against slots of an unrelated conversation",
    ("gaussian", "gaussian-channel"): "noise like the layer against noise like each head's channels",
    ("zeros", "zero-values"): "zeros in K and V against zeros in V alone",
    ("distractor", "distractor-matched"): "an unrelated conversation's slots as they are against moved and scaled ones",
    ("foreign-block", "distractor"): "an unrelated conversation's slots in whole blocks against single slots",
}
"""Pairs of faults whose difference says why one of them hurts; the first two are claims of canarypwn's article."""
UNCHANGED = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.02}
"""Nats of KL that slots in another order may cost by rounding, by the dtype of the model."""
KL_NEEDS = 2
"""Items with a KL below which there is no interval."""


@dataclass(frozen=True)
class Answers:
    """The answers of one condition on one task; repeats of an item are averaged.

    Attributes:
        rows: one for each item and repeat.
        items: samples in order.
    """

    rows: Rows
    items: Sequence[int]

    def right(self, scorer: str) -> Float[np.ndarray, "items"]:
        """Share of right answers; a broken row is wrong whatever it said."""
        return self._by_item(self.rows[f"score_{scorer}"].astype(bool) & (self.rows["broken"] == ""))

    @property
    def same(self) -> Float[np.ndarray, "items"]:
        return self._by_item(self.rows["same"])

    @property
    def kl(self) -> Float[np.ndarray, "items"]:
        """In nats; missing where all rows of an item broke, or KL was not measured."""
        return self._by_item(self.rows["kl"])

    @property
    def broken(self) -> int:
        return int((self.rows["broken"] != "").sum())

    def first_divergence(self) -> dict[str, float | None]:
        """Quartiles of the first token that was not the clean one; None stands for never."""
        steps = self.rows["diverged"].astype(float)
        found = np.quantile(steps.where(steps >= 0, np.inf), [0.25, 0.5, 0.75], method="inverted_cdf")
        return {
            name: None if np.isinf(step) else float(step)
            for name, step in zip(("low", "median", "high"), found, strict=True)
        }

    def _by_item(self, values: Any) -> Float[np.ndarray, "items"]:
        means = values.astype(float).groupby(self.rows["sample"]).mean()
        return means.reindex(list(self.items)).to_numpy(dtype=float)


def analyse(
    table: Rows, config: Config, tasks: Sequence[Task], *, window: int | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """The numbers of a run.

    Args:
        table: one row per case, as `collect` gives it.
        window: the shortest sliding window of the model's layers, if there is one.
        dtype: of the model.
    """
    broken = table[(table["broken"] != "") & (table["fault"] != NOT_A_NUMBER)]
    longest = {task.name: task.max_new_tokens for task in tasks}
    reach = int((table["slots"] + table["task"].map(longest)).max())
    return {
        "items": config.samples,
        "rates": list(config.rates),
        "faults": list(config.faults),
        "reach": reach,
        "window": window,
        "tasks": {task.name: _task(table, config, task, len(tasks)) for task in tasks},
        "broken": {
            "rows": len(broken),
            "of": int((table["fault"] != NOT_A_NUMBER).sum()),
            "first": None if broken.empty else _where(broken.iloc[0]),
        },
        "controls": _controls(table, config, dtype, all_visible=window is None or reach <= window),
    }


def _task(table: Rows, config: Config, task: Task, tasks: int) -> dict[str, Any]:
    mine = table[table["task"] == task.name]
    items = sorted(mine["sample"].unique().tolist())
    clean = Answers(mine[mine["case"] == -1], items)
    headline = task.scorers[0]
    accuracy = clean.right(headline)
    level: dict[tuple[str, float], Answers] = {}
    main = mine[mine["group"] == MAIN]
    for name in config.faults:
        for rate in config.rates:
            level[name, rate] = Answers(main[(main["fault"] == name) & (main["rate"] == rate)], items)
    can = rankable(float(accuracy.mean()), task.chance)
    ranked = [name for name in config.faults if not CATALOGUE[name].control]
    lost = {
        name: np.mean([accuracy - level[name, rate].right(headline) for rate in config.rates], axis=0)
        for name in ranked
    }
    kl = {name: np.mean([level[name, rate].kl for rate in config.rates], axis=0) for name in ranked}
    # Rows that broke have no KL: without them a fault would look milder than it is.
    sound = [name for name in ranked if not any(level[name, rate].broken for rate in config.rates)]
    whole = {name: kl[name] for name in sound if bool(np.isfinite(kl[name]).all())}
    return {
        "chance": task.chance,
        "scorers": list(task.scorers),
        "slots": [int(mine["slots"].min()), int(mine["slots"].max())],
        "clean": {name: _share(clean.right(name)) for name in task.scorers},
        "rankable": can,
        "too_hard": too_hard(task.name, float(accuracy.mean()), task.chance),
        "levels": [
            {"fault": name, "rate": rate, **_level(answers, clean, task.scorers)}
            for (name, rate), answers in level.items()
        ],
        "ranking": _ranking(lost, DIFFERENCE, tasks) if can and lost else None,
        "ranking_kl": _ranking(whole, UNBOUNDED, tasks) if whole else None,
        "unranked_kl": [name for name in ranked if name not in whole],
        "cliffs": _cliffs(level, accuracy, config, headline) if can else None,
        "contrasts": _contrasts(lost if can else {}, whole),
        "procedure": _procedure(mine, config, clean, headline, items),
        "examples": _examples(mine, config),
    }


def _level(answers: Answers, clean: Answers, scorers: Sequence[str]) -> dict[str, Any]:
    """The measures of one condition."""
    return {
        "accuracy": {name: _share(answers.right(name)) for name in scorers},
        "lost": {name: _difference(clean.right(name) - answers.right(name)) for name in scorers},
        "same": _share(answers.same),
        "kl": _known(answers.kl),
        "diverged": answers.first_divergence(),
        "rows": len(answers.rows),
        "broken": answers.broken,
        "untouched": int((answers.rows["struck"] == 0).sum()),
    }


def _difference(values: Float[np.ndarray, "items"], comparisons: int = 1) -> dict[str, Any]:
    """The mean of a difference between shares, paired by item."""
    return estimate(values, within=DIFFERENCE, comparisons=comparisons).record()


def _known(values: Float[np.ndarray, "items"]) -> dict[str, Any] | None:
    """The mean over the items that have a number; None where too few have."""
    known = values[np.isfinite(values)]
    return estimate(known).record() if len(known) >= KL_NEEDS else None


def _share(values: Float[np.ndarray, "items"]) -> dict[str, float]:
    """Repeats of an item are no new items, so the interval is that of as many trials as there are items."""
    return wilson(min(float(values.sum()), len(values)), len(values)).record()


def _ranking(
    harm: Mapping[str, Float[np.ndarray, "items"]], within: tuple[float, float], tasks: int
) -> list[dict[str, Any]]:
    """Faults from the worst on, each with what it exceeds the next one by.

    The headline picks from the harms of all faults on all tasks, so their intervals hold together.
    """
    order = sorted(harm, key=lambda name: -float(harm[name].mean()))
    found: list[dict[str, Any]] = [
        {
            "fault": name,
            "harm": estimate(harm[name], within=within, comparisons=tasks * len(order)).record(),
            "over_next": None,
        }
        for name in order
    ]
    for entry, (name, after) in zip(found, pairwise(order), strict=False):
        entry["over_next"] = estimate(harm[name] - harm[after], within=within, comparisons=len(order) - 1).record()
    return found


def _cliffs(
    level: Mapping[tuple[str, float], Answers],
    clean: Float[np.ndarray, "items"],
    config: Config,
    scorer: str,
) -> dict[str, float | None]:
    """The lowest rate at which accuracy is significantly below half of the clean one; None where none has."""
    found: dict[str, float | None] = {}
    for name in config.faults:
        fallen = (
            rate
            for rate in config.rates
            if estimate(level[name, rate].right(scorer) - clean / 2, within=DIFFERENCE).below()
        )
        found[name] = next(fallen, None)
    return found


def _contrasts(
    lost: Mapping[str, Float[np.ndarray, "items"]], kl: Mapping[str, Float[np.ndarray, "items"]]
) -> list[dict[str, Any]]:
    """What the first of two faults costs more than the second, averaged over rates."""

    def more(
        harm: Mapping[str, Float[np.ndarray, "items"]], pair: tuple[str, str], within: tuple[float, float]
    ) -> dict[str, Any] | None:
        if not set(pair) <= set(harm):
            return None
        measured = sum(set(each) <= set(harm) for each in CONTRASTS)
        return estimate(harm[pair[0]] - harm[pair[1]], within=within, comparisons=measured).record()

    found = [
        {"faults": list(pair), "lost": more(lost, pair, DIFFERENCE), "kl": more(kl, pair, UNBOUNDED)}
        for pair in CONTRASTS
    ]
    return [each for each in found if each["lost"] or each["kl"]]


def _procedure(mine: Rows, config: Config, clean: Answers, scorer: str, items: Sequence[int]) -> list[dict[str, Any]]:
    """Canarypwn's faults in every timing and unit, and what each loses beyond fresh damage to whole slots."""
    rows = mine[mine["group"] == PROCEDURE]
    if rows.empty:
        return []

    def answers(fault: str, timing: str, unit: str) -> Answers:
        chosen = (rows["fault"] == fault) & (rows["timing"] == timing) & (rows["unit"] == unit)
        return Answers(rows[chosen], items)

    found = []
    for fault in REPORTED_FAULTS:
        usual = answers(fault, "fresh", "slot").right(scorer)
        for timing in TIMINGS:
            for unit in PROCEDURE_UNITS:
                each = answers(fault, timing, unit)
                beyond = _difference(usual - each.right(scorer), len(TIMINGS) * len(PROCEDURE_UNITS))
                measured = _level(each, clean, [scorer])
                found.append({"fault": fault, "timing": timing, "unit": unit, "beyond": beyond, **measured})
    return found


def _examples(mine: Rows, config: Config) -> dict[str, Any]:
    """The answers to the first item that a sound cache gets right (or to the first at all), sound and at the middle
    rate."""
    rate = middle_rate(config)
    sound = mine[mine["case"] == -1]
    shown = sound[sound["right"].astype(bool)] if sound["right"].any() else sound
    first = mine[mine["sample"] == shown["sample"].min()]
    main = first[(first["group"] == MAIN) & (first["rate"] == rate) & (first["repeat"] == 0)]
    return {
        "place": int(first["sample"].iloc[0] - mine["sample"].min()),
        "answer": str(first["answer"].iloc[0]),
        "clean": str(first[first["case"] == -1]["text"].iloc[0]),
        "rate": rate,
        "damaged": {str(name): str(text) for name, text in zip(main["fault"], main["text"], strict=True)},
    }


def middle_rate(config: Config) -> float:
    """The rate at which tables that show one of them stand."""
    return config.rates[(len(config.rates) - 1) // 2]


def _controls(table: Rows, config: Config, dtype: str, all_visible: bool) -> dict[str, Any]:
    """Whether nothing did nothing, a NaN was found, and slots in another order made no difference."""
    controls = table[table["group"] == CONTROL]
    nothing = controls[controls["rate"] == 0]
    nan = controls[controls["fault"] == NOT_A_NUMBER]
    allowed = UNCHANGED[dtype]
    found: dict[str, Any] = {
        "nothing": {
            "rows": len(nothing),
            "kl": _largest(nothing),
            "same": int(nothing["same"].sum()),
            "holds": bool(
                nothing["same"].all() and (nothing["struck"] == 0).all() and _within(nothing, allowed, config)
            ),
        },
        "nan": {
            "rows": len(nan),
            "found": int((nan["broken"] != "").sum()),
            "holds": bool((nan["broken"] != "").all()),
        },
        "reordered": [],
        "allowed": allowed,
    }
    for name in config.faults:
        if CATALOGUE[name].control:
            rows = table[(table["group"] == MAIN) & (table["fault"] == name)]
            entry = {"fault": name, "rows": len(rows), "kl": _largest(rows), "same": int(rows["same"].sum())}
            holds = _within(rows, allowed, config) and (config.follow or bool(rows["same"].all()))
            found["reordered"].append({**entry, "holds": holds if all_visible else None})
    return found


def _largest(rows: Rows) -> float | None:
    largest = float(rows["kl"].max())
    return None if np.isnan(largest) else largest


def _within(rows: Rows, allowed: float, config: Config) -> bool:
    """Whether every row was measured and is as near as allowed; without KL there is nothing to exceed it."""
    return not config.follow or bool((rows["kl"] <= allowed).all())


def _where(row: Any) -> str:
    """Which row broke first, and where."""
    fault = "no fault" if row["case"] == -1 else f"{row['fault']} at {row['rate']:g} %"
    return f"{row['broken']} (task {row['task']}, item {row['item']}, {fault})"
