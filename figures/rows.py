"""Binds every interval in a table of the pages of results to the finding that it is.

    python figures/rows.py [PAGE …]

writes docs/results/rows.csv: a line for each interval, in the order of the pages, with its run, the finding's name and
keys, and what it is multiplied by (100 in percent, −1 with its sign turned). What is recorded is kept. Where several
findings have the numbers of a new cell, the one is written that shares most with the row, the column and the findings
beside it; it cannot know what a label means, so read the lines that changed. A test holds the pages against them.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
RECORD = RESULTS / "rows.csv"
LEFT_OUT = ("claims", "index", "costs")
"""Pages that name no runs: their intervals are those of the pages that they link, or of a benchmark."""
MAPS = ("site", "slot")
"""Findings of every site: among thousands any interval is found by chance, and pages quote none of them."""
NUMBER = r"[−+]?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(
    rf"(?<![\w.,–/−+-])({NUMBER})(?:[^()|\d]{{0,60}}\(|(?: %| (?:points|nats|logits)[a-z ]*)?, )"
    rf"(?:range )?({NUMBER}) to ({NUMBER})(?=[ %a-z]*[),;])"
)
"""A number and its interval: "x (a to b)", "x points (a to b)", "(x %, a to b)"."""
TIMES = (1, -1, 100, -100)
"""A finding may be written in percent, and as a loss in place of a gain."""
ENDS = ("mean", "low", "high", "smallest", "largest")


class Cell(NamedTuple):
    """Where an interval stands: its page, the number of the table there, and the labels of its row and column."""

    page: str
    table: int
    row: str
    column: str


class Bound(NamedTuple):
    """The finding that an interval is."""

    run: str
    finding: str
    keys: str
    times: int


def text_of(page: str) -> str:
    return " ".join((RESULTS / f"{page}.md").read_text(encoding="utf-8").split())


def pages() -> list[str]:
    return sorted({page.stem for page in RESULTS.glob("*.md")} - {*LEFT_OUT})


@cache
def findings_of(page: str) -> dict[Bound, tuple[float, ...]]:
    """The findings of the runs that a page names, each way that it may be written, with mean and both ends."""
    declared = re.findall(r"\(runs/([\w.-]+?)(?:/config\.yaml)?\)", text_of(page).rpartition(" Runs: ")[2])
    return {
        Bound(run, name, keys, times): (times * ends[0], *sorted(times * end for end in ends[1:]))
        for run in declared
        for (name, keys), ends in run_of(run).items()
        if name not in MAPS
        for times in TIMES
    }


@cache
def run_of(run: str) -> dict[tuple[str, str], tuple[float, ...]]:
    """By name and keys, mean and both ends: of the interval, or of the range where there is none."""
    with (RESULTS / "runs" / run / ("" if run.endswith(".csv") else "metrics.json")).open(encoding="utf-8") as file:
        records: list[Any] = [*csv.DictReader(file)] if run.endswith(".csv") else json.load(file)["findings"]
    findings = {}
    for record in records:
        keys = record.get("keys", {key: record[key] for key in record if key not in (*ENDS, "measure")})
        mean, low, high, *span = (float("nan" if record.get(end) in ("", None) else record[end]) for end in ENDS)
        name = record["name" if "name" in record else "measure"]
        called = "; ".join(f"{key}={value}" for key, value in keys.items())
        findings[name, called] = (mean, *(span if isnan(low) or isnan(high) else (low, high)))
    return findings


def cells(page: str) -> Iterator[tuple[Cell, str]]:
    """Every interval in the tables of a page. A row is labelled by its first cell, or as many as set it apart."""
    lines = (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    tables = [[*table] for is_table, table in groupby(lines, lambda line: line.startswith("|")) if is_table]
    for number, table in enumerate(tables, 1):
        rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table]
        free = [n for n, column in enumerate(zip(*rows, strict=True), 1) if not INTERVAL.search("|".join(column))]
        labels = next((n for n in free if len({(*row[:n],) for row in rows}) == len(rows)), 1)
        for row in rows:
            for cell, column in zip(row, rows[0], strict=True):
                for interval in INTERVAL.finditer(cell):
                    yield Cell(page, number, "; ".join(row[:labels]), column), interval[0]


def is_among(interval: str, findings: np.ndarray) -> np.ndarray:
    """Which of the findings an interval is, to the digit."""
    numbers = re.findall(NUMBER, interval)
    values = [float(number.replace("−", "-").replace(",", "")) for number in numbers]
    half = [0.5001 * 10.0 ** -len(number.partition(".")[2]) for number in numbers]
    return np.all(np.abs(findings - values) <= half, axis=1)


@cache
def recorded() -> list[tuple[Cell, Bound]]:
    if not RECORD.exists():
        return []
    with RECORD.open(encoding="utf-8", newline="") as file:
        return [
            (Cell(page, int(table), row, column), Bound(run, finding, keys, int(times)))
            for page, table, row, column, run, finding, keys, times in [*csv.reader(file)][1:]
        ]


def recorded_of(page: str) -> list[tuple[Cell, Bound]]:
    """What is recorded of a page."""
    return [line for line in recorded() if line[0].page == page]


def bound_to(page: str) -> list[tuple[Cell, Bound]]:
    """The finding of each interval in the tables of a page: the recorded one, or for a new cell the likeliest.

    Raises:
        SystemExit: an interval is no finding, or not the one that is recorded for its row and column.
    """
    findings, recorded = findings_of(page), recorded_of(page)
    names, ends = [*findings], np.array([*findings.values()])
    places: list[Cell] = []
    candidates: list[list[Bound]] = []
    for cell, interval in cells(page):
        bounds = [names[place] for place in np.flatnonzero(is_among(interval, ends))]
        here = [bound for at, bound in recorded if at == cell][places.count(cell) :][:1]
        known = {bound for at, bound in recorded if at[2:] == cell[2:]}  # in any table, for one may have been added
        candidates.append([*{*here} & {*bounds}] or [bound for bound in bounds if not known or bound in known])
        places.append(cell)
        if not candidates[-1]:
            raise SystemExit(
                f"{interval} is not the finding of {cell}: {known or 'no run has it'}. Correct the page or the run; "
                f"if the record is wrong, delete its line in {RECORD.name}."
            )
    chosen = [bounds[0] for bounds in candidates]
    for _ in range(6):  # a choice depends on those beside it
        for place, cell in enumerate(places):
            table = [other for other, at in enumerate(places) if at.table == cell.table and other != place]
            lines = [
                [(items(chosen[other]), 1 / len(candidates[other])) for other in table if places[other][side] == label]
                for side, label in ((2, cell.row), (3, cell.column))
            ]
            taken = {chosen[other] for other in table}
            scores = [likeness(bound, cell, lines) - 0.05 * (bound in taken) for bound in candidates[place]]
            chosen[place] = candidates[place][scores.index(max(scores))]
    return [*zip(places, chosen, strict=True)]


def likeness(bound: Bound, cell: Cell, lines: list[list[tuple[set[str], float]]]) -> float:
    """How much a finding shares with its labels, and each of its items with those of its row or its column."""
    alike = [
        max(
            sum(weight for others, weight in line if item in others) / (sum(weight for _, weight in line) or 1)
            for line in lines
        )
        for item in items(bound)
    ]
    labels, called = (set(re.findall(r"[a-z]+|\d+", str(words).lower())) for words in (cell[2:], bound[:3]))
    return sum(alike) / len(alike) + len(labels & called) / len(labels | called)


def items(bound: Bound) -> set[str]:
    return {bound.run, f"finding {bound.finding}", f"times {bound.times}", *bound.keys.split("; ")}


def main(named: list[str]) -> None:
    lines = [line for page in pages() for line in (bound_to(page) if page in (named or pages()) else recorded_of(page))]
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Cell._fields, *Bound._fields))
        writer.writerows((*cell, *bound) for cell, bound in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
