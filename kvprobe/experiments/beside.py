"""Two runs of one study side by side: what differs in what was asked, and in what came out.

Where both runs measured the same samples, a difference has a paired interval: over samples, of one run's values less
the other's. It is given for findings that are the mean of a column of `samples.parquet`, which is checked against the
finding itself. Each interval holds by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.brief import Brief, Table, frame_table
from kvprobe.errors import UserError
from kvprobe.experiments.runs import Run
from kvprobe.files import write_whole
from kvprobe.names import shown
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.views.page import render
from kvprobe.stats import DIFFERENCE, UNBOUNDED, Estimate, estimate
from kvprobe.tidy import Rows, chosen, cluster_means
from kvprobe.wording import signed

PRINTED = 40
"""Findings that are printed; the page has all."""
SAMPLE = "sample"


@dataclass(frozen=True, repr=False)
class RunsBeside(Brief):
    """Two runs of one study.

    Attributes:
        study: its name.
        one, other: their folders.
        differing: settings, model, versions and machine that are not the same, by name.
        findings: one row for each: name, keys, the mean in both runs (`one`, `other`), the `difference` of the other
            from the one, and where samples pair its 95 % interval (`low`, `high`).
        rest: findings that only one of the runs has.
    """

    study: str
    one: Path
    other: Path
    differing: Mapping[str, tuple[Any, Any]]
    findings: pd.DataFrame = field(repr=False)
    rest: int = 0

    def _table(self) -> Table:
        return frame_table(self.findings)

    def __str__(self) -> str:
        return "\n".join(chain(self.changes(), [""], self.lines(PRINTED)))

    def changes(self) -> Iterator[str]:
        """What differs between the two, a line each."""
        yield f"{self.study}: {self.other} less {self.one}"
        for name, (one, other) in self.differing.items():
            yield f"  {name}: {shown(one)} and {shown(other)}"
        if not self.differing:
            yield "  the same settings, model, versions and machine"

    def lines(self, most: int) -> Iterator[str]:
        """The findings, a line each."""
        for row in self.cells()[:most]:
            yield "  ".join(row)
        if len(self.findings) > most:
            yield f"… and {len(self.findings) - most} more, which are on the page."
        if self.rest:
            yield f"{self.rest} findings are of one of the runs alone."

    def cells(self) -> list[tuple[str, str, str, str]]:
        """What is said of each finding: its name and keys, both numbers, and the difference with its interval."""
        rows: list[tuple[str, str, str, str]] = []
        records: Any = self.findings.to_dict("records")
        for record in records:
            keys = ", ".join(
                f"{key} {value}"
                for key, value in record.items()
                if key not in ("name", "unit", "one", "other", "difference", "low", "high") and not pd.isna(value)
            )
            known = not np.isnan(record["low"])
            difference = Estimate(record["difference"], record["low"], record["high"], 2)
            rows.append(
                (
                    f"{record['name']} ({keys})" if keys else record["name"],
                    f"{record['one']:.4g} {record['unit']}".strip(),
                    f"{record['other']:.4g} {record['unit']}".strip(),
                    signed(difference) if known else f"{record['difference']:+.3g}",
                )
            )
        return rows

    def save(self, path: str | Path) -> Path:
        """Write the page as one HTML file that needs no other."""
        page = render("beside.html.j2", [], title=f"{self.study}: two runs", beside=self)
        return write_whole(path, page)


def beside(one: Run, other: Run) -> RunsBeside:
    """Two finished runs of one study, side by side.

    Raises:
        UserError: they are of different studies, or one is unfinished.
    """
    studies = [run.config.get("study") for run in (one, other)]
    if studies[0] != studies[1]:
        raise UserError(
            f"{one.path} is a run of {shown(studies[0])} and {other.path} of {shown(studies[1])}; compare two runs of "
            "one study."
        )
    ours, theirs = (Findings.from_records(run.metrics.get("findings")) for run in (one, other))
    tables = _pairing(one, other)
    rows = []
    for finding in ours:
        twin = theirs.find(finding.name, **finding.keys)
        if twin is not None:
            paired = None if tables is None else _paired(*tables, finding, twin)
            value = paired or Estimate(twin.value.mean - finding.value.mean)
            means = {"one": finding.value.mean, "other": twin.value.mean, "difference": value.mean}
            known = {"name": finding.name, **finding.keys, "unit": finding.unit}
            rows.append({**known, **means, "low": value.low, "high": value.high})
    rest = len(ours) + len(theirs) - 2 * len(rows)
    keys = dict.fromkeys(key for row in rows for key in row)
    last = ("unit", "one", "other", "difference", "low", "high")
    table = pd.DataFrame(rows, columns=[*(key for key in keys if key not in last), *last])
    return RunsBeside(str(studies[0]), one.path, other.path, _differing(one, other), table, rest)


def _differing(one: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Settings and circumstances that the two do not share."""

    def known(run: Run) -> dict[str, Any]:
        environment = run.environment
        versions = {f"version of {name}": version for name, version in environment["versions"].items()}
        rest = {name: environment.get(name) for name in ("model", "inputs", "device", "machine", "python", "commit")}
        return {**(run.config.get("settings") or {}), **{f"{name} (env.json)": rest[name] for name in rest}, **versions}

    ours, theirs = known(one), known(other)
    names = dict.fromkeys([*ours, *theirs])
    return {name: (ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)}


def _pairing(one: Run, other: Run) -> tuple[Rows, Rows] | None:
    """The tables of both runs, if they are about the same samples: of the same numbers, seed and files, and with the
    same texts wherever a text is the same in all rows of a sample."""
    if any(one.environment.get(name) != other.environment.get(name) for name in ("inputs", "seed")):
        return None
    if not all((run.path / "samples.parquet").is_file() for run in (one, other)):
        return None
    tables: tuple[Rows, Rows] = (one.df(), other.df())
    if any(SAMPLE not in table for table in tables) or set(tables[0][SAMPLE]) != set(tables[1][SAMPLE]):
        return None
    for column in tables[0].select_dtypes(exclude=["number", "bool"]).columns.intersection(tables[1].columns):
        texts = [table.groupby(SAMPLE)[column].agg(["nunique", "first"]) for table in tables]
        if all((text["nunique"] == 1).all() for text in texts) and not texts[0]["first"].equals(texts[1]["first"]):
            return None
    return tables


def _paired(one: Rows, other: Rows, finding: Finding, twin: Finding) -> Estimate | None:
    """The difference of two findings over their samples; None where no column has both as its means."""
    where = {key: value for key, value in finding.keys.items() if key in one and key in other}
    tables: list[Rows] = [chosen(table, where) for table in (one, other)]
    clusters = [np.unique(table[SAMPLE]) for table in tables]
    if not len(clusters[0]) or not np.array_equal(clusters[0], clusters[1]):
        return None
    numeric = [
        column
        for column in one.select_dtypes(["number", "bool"]).columns
        if column != SAMPLE and column in other and column not in where
    ]
    named = [column for column in (finding.name, *map(str, finding.keys.values())) if column in numeric]
    found: list[Estimate] = []
    for column in dict.fromkeys([*named, *numeric]):
        values = [
            cluster_means(table, (), column, SAMPLE, known)[0][1] for table, known in zip(tables, clusters, strict=True)
        ]
        same = all(
            np.isfinite(value).all() and np.isclose(value.mean(), stated.value.mean, rtol=1e-9, atol=1e-12)
            for value, stated in zip(values, (finding, twin), strict=True)
        )
        if same and (column in named or any(np.ptp(value) > 0 for value in values)):
            shares = all(value.min() >= 0 and value.max() <= 1 for value in values)
            difference = estimate(values[1] - values[0], None, DIFFERENCE if shares else UNBOUNDED)
            if column in named:
                return difference
            found.append(difference)
    # Of several columns with the same means, it is unknown which one the finding is of.
    return found[0] if len(found) == 1 else None
