"""Does a mistake poison mixtures of experts more than dense models? `python models/dense_or_mixture.py FOLDER`

FOLDER holds models that `kvprobe train steps` made, of several shapes and seeds. The study `poisoning` is run on each
(runs that are there are not run again), and a table has a row for each measure, with the value of each seed (of more
than three, their mean and range), and how much more the mixtures have than the dense models: the difference of means,
with a 95 % interval over seeds (Welch's t). The numbers go to FOLDER/poisoning-seeds.csv, which is published in
docs/results/runs; a copy of it in FOLDER stands for the models that are not there.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_ind

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.report.findings import Findings, Key
from kvprobe.studies import find
from kvprobe.studies.poisoning import Config

SHAPES = {"moe": "mixture", "active": "dense, active parameters", "total": "dense, all parameters"}
SLIP: dict[str, Key] = {"draft": "slip"}
MEASURES: dict[str, tuple[str, dict[str, Key]]] = {
    "right after a sound draft": ("right", {"arm": "continue", "draft": "sound"}),
    "right after the slip, gone on with": ("right", {"arm": "continue", **SLIP}),
    "`wait` at once, more than at a right value": ("notices", {}),
    "right if the model itself remarks on it": ("right", {"arm": "at once", **SLIP}),
    "right after a review of its own": ("right", {"arm": "review", **SLIP}),
    "right after a review of another's": ("right", {"arm": "other's", **SLIP}),
    "right after “wait” one step later": ("right", {"arm": "wait", **SLIP}),
    "right after an erratum": ("right", {"arm": "erratum", **SLIP}),
    "right after a restart with the text": ("right", {"arm": "handed", **SLIP}),
    "right step by step": ("right", {"arm": "alone", **SLIP}),
    "damage left with the step masked": ("ghost", {}),
    "damage undone by V of the step": ("undone", {"edit": "sound step, V"}),
    "slope of errors": ("conditioned", {}),
}


@dataclass(frozen=True)
class Row:
    """In percent: the value of one training; or without a `seed`, the mean and the range of many, or how much more
    mixtures have than a dense shape."""

    measure: str
    shape: str
    seed: int | None
    mean: float
    low: float | None = None
    high: float | None = None


def findings_of(model: Path) -> Findings:
    """Of the study on this model."""
    run: Run = find("poisoning").run(Config(model=str(model)), Path("runs"))
    return Conclusion.of(run.metrics).findings


def main() -> None:
    folder = Path(sys.argv[1])
    path = folder / "poisoning-seeds.csv"
    known = {(row.measure, row.shape, row.seed): row for row in (rows_of(path) if path.is_file() else ())}
    known |= {(row.measure, row.shape, row.seed): row for row in values_of(folder)}
    values = sorted(
        (row for row in known.values() if row.seed is not None),
        key=lambda row: ([*SHAPES].index(row.shape), row.seed, [*MEASURES].index(row.measure)),
    )
    rows = [*values, *ranges(values), *differences(values)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, asdict(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    print("\n".join(table(rows)))


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a table that was written."""
    with path.open(encoding="utf-8") as file:
        for record in csv.DictReader(file):
            numbers: Any = {name: float(record[name]) if record[name] else None for name in ("mean", "low", "high")}
            yield Row(record["measure"], record["shape"], int(record["seed"]) if record["seed"] else None, **numbers)


def values_of(folder: Path) -> Iterator[Row]:
    """The measures of each model."""
    for shape in SHAPES:
        for model in folder.glob(f"steps-{shape}-corrected-*"):
            findings = findings_of(model)
            for measure, (name, keys) in MEASURES.items():
                seed = int(model.name.rpartition("-")[2])
                yield Row(measure, shape, seed, round(100 * findings.at(name, **keys).mean, 4))


def ranges(values: Sequence[Row]) -> Iterator[Row]:
    """The mean of a shape's seeds and their range, where they are more than three."""
    for shape in SHAPES:
        for measure in MEASURES:
            if len(seeds := means(values, measure, shape)) > 3:
                yield Row(measure, shape, None, round(float(np.mean(seeds)), 4), min(seeds), max(seeds))


def differences(values: Sequence[Row]) -> Iterator[Row]:
    """How much more the mixtures have than each dense shape: with an interval where seeds differ at all."""
    for measure in MEASURES:
        mixture = means(values, measure, "moe")
        for shape in SHAPES:
            dense = means(values, measure, shape)
            if shape == "moe" or not dense or not mixture:
                continue
            more = Row(measure, f"moe less {shape}", None, round(float(np.mean(mixture) - np.mean(dense)), 4))
            if min(len(mixture), len(dense)) < 2 or not (np.ptp(mixture) or np.ptp(dense)):
                yield more
                continue
            low, high = ttest_ind(mixture, dense, equal_var=False).confidence_interval(0.95)
            yield replace(more, low=round(float(low), 4), high=round(float(high), 4))


def means(rows: Sequence[Row], measure: str, shape: str) -> list[float]:
    return [row.mean for row in rows if (row.measure, row.shape) == (measure, shape)]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = SHAPES | {f"moe less {shape}": f"{SHAPES['moe']} less {SHAPES[shape]}" for shape in SHAPES}
    yield f"| % | {' | '.join(names[shape] for shape in shapes)} |"
    yield "|---" * (1 + len(shapes)) + "|"
    for measure in MEASURES:
        cells = [cell([row for row in rows if (row.measure, row.shape) == (measure, shape)]) for shape in shapes]
        yield f"| {measure} | {' | '.join(cells)} |".replace("-", "−")


def cell(rows: Sequence[Row]) -> str:
    """Each seed's value; of many the mean and the range; or a difference with its interval."""
    last = rows[-1]
    if last.seed is not None:
        return ", ".join(f"{row.mean:z.1f}" for row in rows)
    if len(rows) > 1:
        return f"{last.mean:z.1f} (range {last.low:z.1f} to {last.high:z.1f})"
    interval = "" if last.low is None else f" ({last.low:z.1f} to {last.high:z.1f})"
    return f"{last.mean:+z.1f}{interval}"


if __name__ == "__main__":
    main()
