"""From rows to numbers: what flips do by dtype, bit and field, where they do more, and at which rate accuracy gives
way.

An item is one cluster. Shares have Wilson intervals over items: the mean over an item's flips counts once. Differences
and KL have jackknife intervals over items.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.faults.scope import bands
from kvprobe.models.geometry import Geometry
from kvprobe.stats import DIFFERENCE, UNBOUNDED, Estimate, estimate, jackknife, wilson
from kvprobe.studies.bitflips.collect import FIELDS, tasks_of
from kvprobe.studies.bitflips.config import Config
from kvprobe.tasks.task import Task, too_hard
from kvprobe.wording import estimate_of

Rows = Any
"""A pandas table, whose own annotations do not tell a column from a table."""

CLASSES = ("nothing", "words", "breaks")
"""Of an item whose clean answer is right: the same answer token for token; another wording, still right; or no longer
right, or numbers that are not finite."""
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
"""By what places are held against each other: breaks (of items whose clean answer is right), answers that changed,
KL."""


def analyse(table: pd.DataFrame, config: Config, shape: Geometry) -> dict[str, Any]:
    """The numbers of a run.

    Args:
        table: see `collect`.
    """
    tasks = {task.name: task for task in tasks_of(config)}
    return {
        "items": config.samples,
        "layers": shape.n_layers,
        "tasks": [_task(rows, tasks[str(name)], config, shape) for name, rows in table.groupby("task", sort=False)],
    }


def _task(table: Rows, task: Task, config: Config, shape: Geometry) -> dict[str, Any]:
    rows, clean = prepared(table)
    accuracy = wilson(int(clean["right"].sum()), len(clean))
    problem = too_hard(task.name, accuracy.mean, task.chance)
    slots = float(clean["slots"].mean())
    # The prompt's last token is read after the strike.
    numbers = (slots - 1) * shape.n_layers * shape.n_kv_heads * 2 * shape.d_head
    single, rates = rows[rows["group"] == "single"], rows[rows["group"] == "rate"]
    # Of the headline: exponent against mantissa and the rates, on every task. Their intervals hold together.
    claims = len(tasks_of(config)) * (1 + len(config.error_rates))
    return {
        "task": task.name,
        "scorer": task.scorers[0],
        "items": len(clean),
        "right": int(clean["right"].sum()),
        "clean": accuracy.record(),
        "chance": task.chance,
        "too_hard": problem,
        "slots": slots,
        "numbers": numbers,
        "dtypes": [
            _dtype(single[single["dtype"] == dtype], dtype, shape.n_layers, problem is None, claims)
            for dtype in config.dtypes
        ],
        "rates": [
            _rate(
                rates[(rates["field"] == field) & np.isclose(rates["rate"], rate, rtol=1e-6, atol=0)],
                numbers,
                claims,
            )
            for field in FIELDS
            for rate in config.error_rates
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


def _dtype(rows: Rows, dtype: str, layers: int, rankable: bool, comparisons: int) -> dict[str, Any]:
    bits = range(LAYOUTS[dtype].bits)
    right = rows[rows["was_right"]]

    def hit(column: str, of: Rows = rows) -> list[int]:
        return [bit for bit in bits if of.loc[of["bit"] == bit, column].any()]

    return {
        "dtype": dtype,
        "all": _summary(rows, rankable),
        "fields": {str(name): _summary(of_field, rankable) for name, of_field in rows.groupby("field", sort=False)},
        "bits": [
            {
                "bit": bit,
                "field": LAYOUTS[dtype].field_of(bit),
                **_summary(rows[rows["bit"] == bit], rankable),
            }
            for bit in bits
        ],
        "altered": hit("different"),
        "nonfinite": hit("nonfinite"),
        "breaking": hit("breaks", right) if rankable else None,
        "contrasts": _contrasts(rows, layers, rankable, comparisons),
    }


def _summary(rows: Rows, rankable: bool) -> dict[str, Any]:
    right = rows[rows["was_right"]]
    return {
        "flips": len(rows),
        "nonfinite_flips": int(rows["nonfinite"].sum()),
        **{name: _share(rows, name) for name in OUTCOMES},
        "right": {name: _share(right, name) for name in (*CLASSES, "nonfinite")} if rankable else None,
        "kl": mean_of(rows, "kl"),
    }


def mean_of(
    rows: Rows, column: str, within: tuple[float, float] = UNBOUNDED, comparisons: int = 1
) -> dict[str, Any] | None:
    """The mean over rows; None if fewer than two items have any."""
    rows = rows[rows[column].notna()]
    if rows["cluster"].nunique() < 2:
        return None
    return estimate(rows[column].to_numpy(float), rows["cluster"].to_numpy(), within, comparisons).record()


def difference(
    one: Rows, other: Rows, column: str, within: tuple[float, float] = UNBOUNDED, comparisons: int = 1
) -> dict[str, Any] | None:
    """By how much one mean exceeds another; None if either has fewer than two items."""
    pair = [rows[rows[column].notna()] for rows in (one, other)]
    if any(rows["cluster"].nunique() < 2 for rows in pair):
        return None
    items = sorted({item for rows in pair for item in rows["cluster"]})
    replicates = []
    for rows in pair:
        place = np.searchsorted(items, rows["cluster"])
        sums, sizes = (
            np.bincount(place, rows[column].astype(float), len(items)),
            np.bincount(place, minlength=len(items)),
        )
        # Not every item has rows of both kinds; without it, the mean of the other kind stays as it is.
        replicates.append((sums.sum() - sums) / (sizes.sum() - sizes))
    mean = float(pair[0][column].mean() - pair[1][column].mean())
    return jackknife(mean, replicates[0] - replicates[1], within, comparisons).record()


def _share(rows: Rows, column: str) -> dict[str, float]:
    """Over the items, each of which counts by the mean over its flips."""
    shares = rows[column].astype(float).groupby(rows["cluster"]).mean()
    return wilson(min(float(shares.sum()), len(shares)), len(shares)).record()


def _contrasts(
    rows: Rows, layers: int, rankable: bool, comparisons: int
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
            return difference(one, other, measure, UNBOUNDED if measure == "kl" else DIFFERENCE, comparisons)
        right = (one[one["was_right"]], other[other["was_right"]])
        return difference(*right, measure, DIFFERENCE, comparisons) if rankable else None

    return {name: {measure: held(measure, one, other) for measure in MEASURES} for name, (one, other) in pairs.items()}


def _rate(rows: Rows, numbers: float, comparisons: int) -> dict[str, Any]:
    rate = float(rows["rate"].iloc[0])
    return {
        "field": str(rows["field"].iloc[0]),
        "rate": rate,
        "expected": numbers * rate,
        "struck": float(rows["struck"].mean()),
        "untouched": int((rows["struck"] == 0).sum()),
        "accuracy": _share(rows, "right"),
        "from_clean": mean_of(rows, "lost", DIFFERENCE, comparisons),
        "changed": _share(rows, "changed"),
        "nonfinite": _share(rows, "nonfinite"),
        "nonfinite_rows": int(rows["nonfinite"].sum()),
        "kl": mean_of(rows, "kl"),
    }


def tolerated(task: Mapping[str, Any], field: str) -> Mapping[str, Any] | None:
    """The highest measured error rate up to which accuracy is at none significantly below clean; None if the lowest
    already is."""
    found = None
    for each in task["rates"]:
        if each["field"] == field:
            if estimate_of(each["from_clean"]).below():
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
    """For each dtype and field the first answer that differs while all numbers are finite, a break of a right answer if
    there is one."""
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
    """What breaks of some flips; or, where the task is too hard for that, what does not stay the same."""
    if ranked:
        return estimate_of(summary["right"]["breaks"])
    return estimate_of(summary["same"]).complement()


def of_field(task: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    """The error rates of a task at which bits of this field flip, smallest first."""
    return [each for each in task["rates"] if each["field"] == field]
