"""Tables that others reported, to be shown beside what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.stats import wilson
from kvprobe.tasks.task import Task


@dataclass(frozen=True)
class Reported:
    """Accuracies by condition and rate, as someone reported them.

    Attributes:
        source: author, title, table.
        samples: items behind each accuracy.
        clean: accuracy without any fault.
        rates: in percent, of which `rows` hold one accuracy each.
    """

    name: str
    source: str
    model: str
    task: str
    samples: int
    clean: float
    rates: tuple[float, ...]
    rows: Mapping[str, tuple[float, ...]]

    def is_about(self, task: str) -> bool:
        """Whether it is about this task, wherever its items were read from."""
        return task.partition(":")[0] == self.task


def reported(name: str) -> Reported:
    """A table by name.

    Raises:
        UserError: kvprobe has no table of this name.
    """
    if name not in tables():
        raise UserError(unknown("reported table", name, tables()))
    return tables()[name]


@cache
def tables() -> dict[str, Reported]:
    """All tables that kvprobe has."""
    text = resources.files("kvprobe.report").joinpath("reported.yaml").read_text(encoding="utf-8")
    return {
        name: Reported(
            name=name,
            source=entry["source"],
            model=entry["model"],
            task=entry["task"],
            samples=entry["samples"],
            clean=float(entry["clean"]),
            rates=tuple(map(float, entry["rates"])),
            rows={row: tuple(map(float, values)) for row, values in entry["rows"].items()},
        )
        for name, entry in yaml.safe_load(text).items()
    }


def add_published(
    findings: Findings, tasks: Sequence[Task], table: Reported, along: str, struck: Mapping[str, Key] | None = None
) -> None:
    """Add what was published (`published` and `published_sound`), with the intervals of its sample size.

    Args:
        along: the key whose values are the table's rows.
        struck: the other keys, the same for all.
    """
    for task in (task.name for task in tasks if table.is_about(task.name)):
        sound = wilson(table.clean * table.samples, table.samples)
        findings.add(Finding("published_sound", {"task": task}, sound))
        for row, shares in table.rows.items():
            for rate, right in zip(table.rates, shares, strict=True):
                keys = {"task": task, **(struck or {}), along: row, "rate": rate}
                findings.add(Finding("published", keys, wilson(right * table.samples, table.samples)))


def published_facts(table: Reported, model: str) -> dict[str, Any]:
    """Where a table comes from, and whether it is about this model."""
    same = model.lower().endswith(table.model.lower())
    return {"source": table.source, "model": table.model, "samples": table.samples, "same_model": same}
