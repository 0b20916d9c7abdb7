"""The result of a patch sweep: one number for each cell."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.patching.grid import Cell


@dataclass(frozen=True)
class PatchMap:
    """A metric with each cell patched.

    Attributes:
        cells: what was swapped.
        values: the metric of the base with each cell swapped.
        base: the metric of the base, unpatched.
        donor: the metric of the donor, unpatched.
        ledger: of the base's slots.
        reads: who sees what was swapped; see `kvprobe.patching.plan.Reads`.
    """

    cells: tuple[Cell, ...]
    values: Float[np.ndarray, "cells"]
    base: float
    donor: float
    ledger: Ledger
    reads: str

    @property
    def effect(self) -> Float[np.ndarray, "cells"]:
        """How far each cell moves the metric from the base."""
        return self.values - self.base

    @property
    def normalised(self) -> Float[np.ndarray, "cells"]:
        """The effect as a share of the way from base to donor: 0 is no effect, 1 the donor's value; NaN where base and
        donor do not differ."""
        way = self.donor - self.base
        return self.effect / way if abs(way) > 1e-6 else np.full_like(self.values, np.nan)

    def df(self) -> pd.DataFrame:
        """One row per cell: the grid's axes, `part`, `content`, `slots` (how many), `value`, `effect`, `normalised`;
        and for single slots their `token`, `position` and `segment`."""
        rows = [
            {**cell.labels, "part": cell.part, "content": cell.content, "slots": len(cell.slots)} for cell in self.cells
        ]
        table = pd.DataFrame(rows)
        if "slot" in table:
            slots = table["slot"].to_numpy()
            table["token"] = self.ledger.tokens[0].cpu().numpy()[slots]
            table["position"] = self.ledger.positions[0].cpu().numpy()[slots]
            names = self.ledger.segments[0].cpu().numpy()[slots]
            table["segment"] = [self.ledger.names[name] for name in names]
        return table.assign(value=self.values, effect=self.effect, normalised=self.normalised)

    def matrix(
        self, rows: str, columns: str, part: str | None = None, content: str = "full", value: str = "normalised"
    ) -> pd.DataFrame:
        """Two axes of the grid as a table of `normalised`, `effect` or `value`, each axis in the grid's own order.

        Raises:
            UserError: an axis that the grid does not have, or cells that also differ in a third axis.
        """
        table = self.df()
        parts = list(dict.fromkeys(table["part"]))
        chosen = table[(table["part"] == (parts[0] if part is None else part)) & (table["content"] == content)]
        for axis in (rows, columns):
            if axis not in table:
                raise UserError(
                    f"The sweep has no axis {axis!r}; choose from {', '.join([*self.cells[0].labels, 'part'])}."
                )
        if len(set(zip(chosen[rows], chosen[columns], strict=True))) < len(chosen):
            raise UserError(f"Cells of one {rows} and {columns} differ in another axis; sweep over these two alone.")
        order: dict[str, Sequence[object]] = {axis: list(dict.fromkeys(chosen[axis])) for axis in (rows, columns)}
        wide = chosen.pivot(index=rows, columns=columns, values=value)
        return wide.reindex(index=order[rows], columns=order[columns])
