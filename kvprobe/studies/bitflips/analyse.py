"""From rows to numbers: what flips do by dtype, bit and field, where they do more, and at which rate accuracy gives way.

An item is one cluster. Shares have Wilson intervals over items: the mean over an item's flips counts once. Differences and
KL resample items, always with the same weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.faults.scope import bands
from kvprobe.geometry import Geometry
from kvprobe.stats import Estimate, cluster_weights, wilson
from kvprobe.studies.bitflips.collect import FIELDS, dtypes_of, tasks_of
from kvprobe.studies.bitflips.config import Config
from kvprobe.tasks.task import Task, too_hard

Rows = Any
"""A pandas table, whose own annotations do not tell a column from a table."""

CLASSES = ("nothing", "words", "breaks")
"""Of an item whose clean answer is right: the same answer token for token; another wording, still right; or no longer right,
or numbers that are not finite."""
OUTCOMES = ("same", "different", "nonfinite")
"""Of any item: the same answer; another one, all numbers finite; or numbers that are not finite."""
CONTRASTS = {
    "exponent - mantissa": "exponent against mantissa",
    "sign - mantissa": "sign against mantissa",
    "top - rest": "the highest exponent bit against the other exponent bits",
    "k - v": "exponent bits of K against those of V",
    "late - early": "exponent bits of late layers against those of early ones",
}
MEASURES = ("breaks", "changed", "kl")
"""By what places are held against each other: breaks (of items whose clean answer is right), answers that changed, KL."""


@dataclass(frozen=True)
class Bootstrap:
    """Intervals by resampling items, the same for all quantities."""

    weights: Int[np.ndarray, "resamples items"]

    def mean(self, rows: Rows, column: str) -> dict[str, float] | None:
        """The mean over rows, as `metrics.json` holds it; None if fewer than two items have any."""
        return self._told(*self._means(rows, column))

    def difference(self, one: Rows, other: Rows, column: str) -> dict[str, float] | None:
        """By how much one mean exceeds another; None if either has too few items."""
        (mine, my_draws), (theirs, their_draws) = self._means(one, column), self._means(other, column)
        return self._told(mine - theirs, my_draws - their_draws)

    def _means(self, rows: Rows, column: str) -> tuple[float, Float[np.ndarray, "resamples"]]:
        rows = rows[rows[column].notna()]
        values, items = rows[column].to_numpy(float), rows["cluster"].to_numpy()
        if len(set(items)) < 2:
            return np.nan, np.full(len(self.weights), np.nan)
        count = self.weights.shape[1]
        sums, sizes = np.bincount(items, values, count), np.bincount(items, minlength=count)
        drawn = self.weights @ sizes
        # Not every item has a row of every kind: a draw without any says nothing.
        return float(values.mean()), np.where(drawn > 0, self.weights @ sums / np.maximum(drawn, 1), np.nan)

    def _told(self, mean: float, draws: Float[np.ndarray, "resamples"]) -> dict[str, float] | None:
        if np.isnan(mean):
            return None
        low, high = np.nanpercentile(draws, [2.5, 97.5])
        return asdict(Estimate(mean, float(low), float(high)))


def analyse(table: pd.DataFrame, config: Config, shape: Geometry) -> dict[str, Any]:
    """The numbers of a run.

    Args:
        table: see `collect`.
    """
    bootstrap = Bootstrap(cluster_weights(config.samples, np.random.default_rng([config.seed, 0, 2])))
    tasks = {task.name: task for task in tasks_of(config)}
    return {
        "items": config.samples,
        "layers": shape.n_layers,
        "tasks": [
            _task(rows, tasks[str(name)], config, shape, bootstrap) for name, rows in table.groupby("task", sort=False)
        ],
    }


def _task(table: Rows, task: Task, config: Config, shape: Geometry, bootstrap: Bootstrap) -> dict[str, Any]:
    rows, clean = prepared(table)
    accuracy = wilson(int(clean["right"].sum()), len(clean))
    problem = too_hard(task.name, accuracy.mean, task.chance)
    slots = float(clean["slots"].mean())
    # The prompt's last token is read after the strike.
    numbers = (slots - 1) * shape.n_layers * shape.n_kv_heads * 2 * shape.d_head
    single, rates = rows[rows["group"] == "single"], rows[rows["group"] == "rate"]
    return {
        "task": task.name,
        "scorer": task.scorers[0],
        "items": len(clean),
        "right": int(clean["right"].sum()),
        "clean": asdict(accuracy),
        "chance": task.chance,
        "too_hard": problem,
        "slots": slots,
        "numbers": numbers,
        "dtypes": [
            _dtype(single[single["dtype"] == dtype], dtype, shape.n_layers, bootstrap, problem is None)
            for dtype in dtypes_of(config)
        ],
        "rates": [
            _rate(
                rates[(rates["field"] == field) & np.isclose(rates["rate"], rate, rtol=1e-6, atol=0)],
                bootstrap,
                numbers,
            )
            for field in FIELDS
            for rate in config.shares
        ],
        "control": _control(rows, single),
        "broken": {"single": _broken(single), "rate": _broken(rates)},
        "examples": _examples(single),
    }


def prepared(table: Rows) -> tuple[Rows, Rows]:
    """The struck rows of a task with what became of each, and its clean rows; `cluster` numbers the items from 0."""
    table = table.assign(cluster=table["sample"].rank(method="dense").astype(int) - 1)
    clean = table[table["case"] == -1].set_index("cluster", drop=False)
    rows = table[table["case"] != -1]
    before = clean.loc[rows["cluster"], ["right", "text"]].set_axis(rows.index)
    broken = rows["broken"] != ""
    same = rows["same"] & ~broken
    return rows.assign(
        was_right=before["right"],
        clean_text=before["text"],
        same=same,
        different=~same & ~broken,
        nonfinite=broken,
        changed=~same,
        nothing=same,
        words=~same & rows["right"],
        breaks=~rows["right"].astype(bool),
        lost=rows["right"].astype(int) - before["right"].astype(int),
    ), clean


def _dtype(rows: Rows, dtype: str, layers: int, bootstrap: Bootstrap, rankable: bool) -> dict[str, Any]:
    bits = range(LAYOUTS[dtype].bits)
    right = rows[rows["was_right"]]

    def hit(column: str, of: Rows = rows) -> list[int]:
        return [bit for bit in bits if of.loc[of["bit"] == bit, column].any()]

    return {
        "dtype": dtype,
        "all": _summary(rows, bootstrap, rankable),
        "fields": {
            str(name): _summary(of_field, bootstrap, rankable) for name, of_field in rows.groupby("field", sort=False)
        },
        "bits": [
            {
                "bit": bit,
                "field": LAYOUTS[dtype].field_of(bit),
                **_summary(rows[rows["bit"] == bit], bootstrap, rankable),
            }
            for bit in bits
        ],
        "altered": hit("different"),
        "nonfinite": hit("nonfinite"),
        "breaking": hit("breaks", right) if rankable else None,
        "contrasts": _contrasts(rows, layers, bootstrap, rankable),
    }


def _summary(rows: Rows, bootstrap: Bootstrap, rankable: bool) -> dict[str, Any]:
    right = rows[rows["was_right"]]
    return {
        "flips": len(rows),
        "nonfinite_flips": int(rows["nonfinite"].sum()),
        **{name: _share(rows, name) for name in OUTCOMES},
        "right": {name: _share(right, name) for name in (*CLASSES, "nonfinite")} if rankable else None,
        "kl": bootstrap.mean(rows, "kl"),
    }


def _share(rows: Rows, column: str) -> dict[str, float]:
    """Over the items, each of which counts by the mean over its flips."""
    shares = rows[column].astype(float).groupby(rows["cluster"]).mean()
    return asdict(wilson(min(float(shares.sum()), len(shares)), len(shares)))


def _contrasts(
    rows: Rows, layers: int, bootstrap: Bootstrap, rankable: bool
) -> dict[str, dict[str, dict[str, float] | None]]:
    fields = {name: rows[rows["field"] == name] for name in ("sign", "exponent", "mantissa")}
    exponent = fields["exponent"]
    top = exponent["bit"].max()
    thirds = bands(layers, min(3, layers))
    pairs = {
        "exponent - mantissa": (exponent, fields["mantissa"]),
        "sign - mantissa": (fields["sign"], fields["mantissa"]),
        "top - rest": (exponent[exponent["bit"] == top], exponent[exponent["bit"] != top]),
        "k - v": (exponent[exponent["part"] == "k"], exponent[exponent["part"] == "v"]),
        "late - early": tuple(exponent[exponent["layer"].isin(third)] for third in (thirds[-1], thirds[0])),
    }

    def held(measure: str, one: Rows, other: Rows) -> dict[str, float] | None:
        if measure != "breaks":
            return bootstrap.difference(one, other, measure)
        return bootstrap.difference(one[one["was_right"]], other[other["was_right"]], measure) if rankable else None

    return {name: {measure: held(measure, one, other) for measure in MEASURES} for name, (one, other) in pairs.items()}


def _rate(rows: Rows, bootstrap: Bootstrap, numbers: float) -> dict[str, Any]:
    rate = float(rows["rate"].iloc[0])
    return {
        "field": str(rows["field"].iloc[0]),
        "rate": rate,
        "expected": numbers * rate,
        "struck": float(rows["struck"].mean()),
        "untouched": int((rows["struck"] == 0).sum()),
        "accuracy": _share(rows, "right"),
        "from_clean": bootstrap.mean(rows, "lost"),
        "changed": _share(rows, "changed"),
        "nonfinite": _share(rows, "nonfinite"),
        "nonfinite_rows": int(rows["nonfinite"].sum()),
        "kl": bootstrap.mean(rows, "kl"),
    }


def tolerated(task: Mapping[str, Any], field: str) -> Mapping[str, Any] | None:
    """The highest measured error rate up to which accuracy is at none surely below clean; None if the lowest already is."""
    found = None
    for each in task["rates"]:
        if each["field"] == field:
            if each["from_clean"]["high"] < 0:
                break
            found = each
    return found


def _control(rows: Rows, single: Rows) -> dict[str, Any]:
    control = rows[rows["group"] == "control"]
    return {
        "rows": len(control),
        "struck": int(control["struck"].max()),
        "changed": int(control["changed"].sum()),
        "kl": float(control["kl"].max()) if control["kl"].notna().any() else None,
        "flips_struck": [int(single["struck"].min()), int(single["struck"].max())],
    }


def _broken(rows: Rows) -> dict[str, Any]:
    """How many rows were not finite, and the first of them."""
    broken = rows[rows["nonfinite"]]
    return {
        "rows": len(rows),
        "broken": len(broken),
        "first": None
        if broken.empty
        else {name: str(broken.iloc[0][name]) for name in ("broken", "item", "dtype", "field")},
    }


def _examples(single: Rows) -> list[dict[str, Any]]:
    """For each dtype and field the first answer that differs while all numbers are finite, a break of a right answer if there
    is one."""
    found = []
    differ = single[single["different"]].sort_values(["was_right", "breaks"], ascending=False, kind="stable")
    for _, rows in differ.groupby(["dtype", "field"], sort=False):
        first = rows.iloc[0]
        found.append(
            {name: str(first[name]) for name in ("dtype", "field", "part", "item", "answer", "clean_text", "text")}
            | {name: int(first[name]) for name in ("bit", "layer", "head")}
            | {"right": bool(first["right"])}
        )
    return found


def harm(summary: Mapping[str, Any], ranked: bool) -> Estimate:
    """What breaks of some flips; or, where that cannot be told, what does not stay the same."""
    if ranked:
        return Estimate(**summary["right"]["breaks"])
    same = summary["same"]
    return Estimate(1 - same["mean"], 1 - same["high"], 1 - same["low"])


def of_field(task: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    """The error rates of a task at which bits of this field flip, smallest first."""
    return [each for each in task["rates"] if each["field"] == field]
