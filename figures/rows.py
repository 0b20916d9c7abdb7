"""Binds every interval in a table of the pages of results to the finding that it is.

    python figures/rows.py [PAGE …]

writes docs/results/rows.csv: a line for each interval, in the order of the pages, with its run, the finding's name and
keys, and how often the finding is taken (100 in percent, −1 with its sign turned). Where several findings have these
numbers, the recorded one is kept; else the one is proposed that shares most with the row, the column and the findings
beside it. It cannot know what a label means: read the lines that changed. A test holds the pages against them.
"""

import csv
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
RECORD = RESULTS / "rows.csv"
LEFT_OUT = ("claims", "index")
"""Pages that name no runs: their intervals are those of the pages that they link."""
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
        for times in TIMES
    }


@cache
def run_of(run: str) -> dict[tuple[str, str], tuple[float, ...]]:
    """By name and keys, mean and both ends: of the interval, or of the range where there is none."""
    with (RESULTS / "runs" / run / ("" if run.endswith(".csv") else "metrics.json")).open(encoding="utf-8") as file:
        records = list(csv.DictReader(file)) if run.endswith(".csv") else json.load(file)["findings"]
    findings = {}
    for record in records:
        keys = record.get("keys", {key: record[key] for key in record if key not in (*ENDS, "measure")})
        mean, *ends = (float("nan" if record.get(end) in ("", None) else record[end]) for end in ENDS)
        called = record.get("name") or record["measure"], "; ".join(f"{key}={value}" for key, value in keys.items())
        findings[called] = (mean, *(ends[2:] if np.isnan(ends[:2]).any() else ends[:2]))
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
    return (np.abs(findings - values) <= half).all(1)


def recorded() -> list[tuple[Cell, Bound]]:
    with RECORD.open(encoding="utf-8", newline="") as file:
        return [
            (Cell(page, int(table), row, column), Bound(run, finding, keys, int(times)))
            for page, table, row, column, run, finding, keys, times in [*csv.reader(file)][1:]
        ]


def proposed(page: str) -> list[tuple[Cell, Bound]]:
    """The finding of each interval in the tables of a page; stops at one that no finding is."""
    findings = findings_of(page)
    ends, names = np.array([*findings.values()]), [*findings]
    known = {*recorded()} if RECORD.exists() else set()
    places, candidates = [], []
    for cell, interval in cells(page):
        places.append(cell)
        candidates.append([names[place] for place in np.flatnonzero(is_among(interval, ends))])
        if not candidates[-1]:
            raise SystemExit(f"No finding of the runs of {page} is {interval}, in {cell}.")
    chosen = [bounds[0] for bounds in candidates]
    for _ in range(6):
        for place, (cell, bounds) in enumerate(zip(places, candidates, strict=True)):
            table = [other for other, at in enumerate(places) if at.table == cell.table and other != place]
            taken = {chosen[other] for other in table}
            lines = [
                [(items(chosen[other]), 1 / len(candidates[other])) for other in table if places[other][side] == cell[side]]
                for side in (2, 3)
            ]
            chosen[place] = max(
                bounds,
                key=lambda bound, cell=cell, lines=lines, taken=taken: ((cell, bound) in known, fit(bound, cell, lines) - 0.05 * (bound in taken)),
            )
    return [*zip(places, chosen, strict=True)]


def fit(bound: Bound, cell: Cell, lines: list[list[tuple[set[str], float]]]) -> float:
    """How much a finding shares with its labels, and each of its items with those of its row or its column."""
    whole = [sum(weight for _, weight in line) or 1.0 for line in lines]
    alike = [
        max(sum(weight for its, weight in line if item in its) / total for line, total in zip(lines, whole, strict=True))
        for item in items(bound)
    ]
    labels, called = (set(re.findall(r"[a-z]+|\d+", str(label).lower())) for label in (cell[2:], bound[:3]))
    return sum(alike) / len(alike) + len(labels & called) / len(labels | called)


def items(bound: Bound) -> set[str]:
    return {bound.run, f"finding {bound.finding}", f"times {bound.times}", *bound.keys.split("; ")}


def main(named: list[str]) -> None:
    bound = recorded() if RECORD.exists() else []
    lines = {page: [line for line in bound if line[0].page == page] for page in pages()}
    lines |= {page: proposed(page) for page in named or pages()}
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Cell._fields, *Bound._fields))
        writer.writerows((*cell, *finding) for page in pages() for cell, finding in lines[page])


if __name__ == "__main__":
    main(sys.argv[1:])
