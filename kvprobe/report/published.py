"""What others published, as findings beside what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.reported import Reported
from kvprobe.stats import binomial
from kvprobe.tasks.task import Task


def add_published(
    findings: Findings, tasks: Sequence[Task], table: Reported, along: str, struck: Mapping[str, Key] | None = None
) -> None:
    """Add what was published (`published` and `published_sound`), with the intervals of its sample size.

    Args:
        along: the key whose values are the table's rows.
        struck: the other keys, the same for all.
    """
    for task in (task.name for task in tasks if table.is_about(task.name)):
        sound = binomial(table.clean * table.samples, table.samples)
        findings.add(Finding("published_sound", {"task": task}, sound))
        for row, shares in table.rows.items():
            for rate, right in zip(table.rates, shares, strict=True):
                keys = {"task": task, **(struck or {}), along: row, "rate": rate}
                findings.add(Finding("published", keys, binomial(right * table.samples, table.samples)))


def published_facts(table: Reported, model: str) -> dict[str, Any]:
    """Where a table comes from, and whether it is about this model."""
    same = model.lower().endswith(table.model.lower())
    return {"source": table.source, "model": table.model, "samples": table.samples, "same_model": same}
