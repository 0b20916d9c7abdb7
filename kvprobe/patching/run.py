"""Running a plan: the metric of the base, of the donor, and of the base with each cell swapped."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from kvprobe.models.loading import free_bytes
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, Metric, kept_by, least_way, measured
from kvprobe.patching.plan import Plan
from kvprobe.patching.reader import Reader
from kvprobe.patching.rows import BYTES, ROWS
from kvprobe.patching.total import TotalReader
from kvprobe.progress import Bar

Runner = Reader | TotalReader
"""Reads the clean row and one row for each cell."""


class Runs:
    """The base's run, the donor's, and those of cells, by one metric.

    Attributes:
        ends: the metric of the base and of the donor.
        least_way: see `PatchMap`.
    """

    def __init__(self, plan: Plan, metric: Metric | KL) -> None:
        self.plan, self._kept = plan, kept_by(metric)
        reader = plan.reads == "reader"
        self._runner: Runner = (
            Reader(plan.lanes, plan.base, plan.contents, plan.suffix) if reader else TotalReader(plan)
        )
        clean = self._runner.logits([], self._kept)[0]
        self._metric: Metric = metric.to(clean) if isinstance(metric, KL) else metric
        donor = Reader(plan.lanes, plan.donor, {}, plan.donor_suffix).logits([], self._kept)[0]
        self.least_way = least_way(self._metric, clean.float(), plan.lanes.dtype)
        self.ends = float(measured(self._metric, clean)), float(measured(self._metric, donor))

    def values(self, numbers: Sequence[int], rows: int, progress: bool) -> Float[np.ndarray, "cells"]:
        """The metric of cells, by number, pass by pass.

        Args:
            rows: most cells to a pass.
        """
        values, plan = [], self.plan
        with Bar(total=len(numbers), desc="Patching", unit="cell", disable=not progress) as bar:
            while len(values) < len(numbers):
                cells = [plan.cells[number] for number in numbers[len(values) : len(values) + rows]]
                # As many as a pass has memory for.
                row_bytes = self._runner.row_bytes(cells)
                fitting = int(min(BYTES, free_bytes(plan.lanes.device) / 4) / row_bytes) - 1
                logits = self._runner.logits(cells[: max(1, fitting)], self._kept)[1:]
                values += [float(measured(self._metric, patched)) for patched in logits]
                bar.update(len(logits))
        return np.array(values)


def in_order(plan: Plan) -> list[int]:
    """The numbers of all cells, in the order in which they are run: a total pass begins at the first slot of any of its
    cells, so cells that begin at the same slot stand together."""
    cells = plan.cells
    return sorted(range(len(cells)), key=lambda number: (plan.reads == "total" and min(cells[number].slots), number))


def run(
    plan: Plan,
    metric: Metric | KL,
    rows: int = ROWS,
    progress: bool = False,
    elsewhere: Callable[[Sequence[int]], Sequence[Float[np.ndarray, "some"]]] | None = None,
) -> PatchMap:
    """The metric with each cell of the plan patched.

    Args:
        rows: most cells to a pass.
        elsewhere: gives the values of these cells piece by piece, if they are not run here.
    """
    runs, order = Runs(plan, metric), in_order(plan)
    values = np.empty(len(order))
    values[order] = np.concatenate([runs.values(order, rows, progress)] if elsewhere is None else elsewhere(order))
    readers = plan.lanes.geometry.readers
    ends, ledger = runs.ends, plan.base.ledger
    return PatchMap(plan.cells, values, *ends, ledger, plan.reads, plan.lanes.tokenizer, readers, runs.least_way)
