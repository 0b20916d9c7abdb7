"""Running a plan: the metric of the base, of the donor, and of the base with each cell swapped."""

import numpy as np
from jaxtyping import Float

from kvprobe.models.loading import free_bytes
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, Metric, kept_by, measured
from kvprobe.patching.plan import Plan
from kvprobe.patching.reader import Reader
from kvprobe.patching.rows import BYTES, ROWS
from kvprobe.patching.total import TotalReader
from kvprobe.progress import Bar

Runner = Reader | TotalReader
"""Reads the clean row and one row for each cell."""


def run(plan: Plan, metric: Metric | KL, rows: int = ROWS, progress: bool = False) -> PatchMap:
    """The metric with each cell of the plan patched.

    Args:
        rows: most cells to a pass.
    """
    kept = kept_by(metric)
    runner = Reader(plan.lanes, plan.base, plan.contents, plan.suffix) if plan.reads == "reader" else TotalReader(plan)
    clean = runner.logits([], kept)[0]
    metric = metric.to(clean) if isinstance(metric, KL) else metric
    donor = Reader(plan.lanes, plan.donor, {}, plan.donor_suffix).logits([], kept)[0]
    ends = float(measured(metric, clean)), float(measured(metric, donor))
    values = _values(runner, plan, metric, kept, rows, progress)
    readers = plan.lanes.geometry.readers
    return PatchMap(plan.cells, values, *ends, plan.base.ledger, plan.reads, plan.lanes.tokenizer, readers)


def _values(
    runner: Runner, plan: Plan, metric: Metric, kept: int, rows: int, progress: bool
) -> Float[np.ndarray, "cells"]:
    """The metric of each cell, pass by pass."""
    cells = plan.cells
    values = np.empty(len(cells))
    # A total pass begins at the first slot of any of its cells, so cells that begin at the same slot stand together.
    order = sorted(range(len(cells)), key=lambda number: (plan.reads == "total" and min(cells[number].slots), number))
    with Bar(total=len(cells), desc="Patching", unit="cell", disable=not progress) as bar:
        while order:
            # As many as a pass has memory for.
            row_bytes = runner.row_bytes([cells[number] for number in order[:rows]])
            fitting = int(min(BYTES, free_bytes(plan.lanes.device) / 4) / row_bytes) - 1
            count = max(1, min(len(order), rows, fitting))
            numbers, order = order[:count], order[count:]
            logits = runner.logits([cells[number] for number in numbers], kept)[1:]
            values[numbers] = [float(measured(metric, patched)) for patched in logits]
            bar.update(count)
    return values
