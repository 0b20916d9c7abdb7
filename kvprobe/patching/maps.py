"""The result of a patch sweep: one number for each cell."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd
from jaxtyping import Float

from kvprobe.brief import Brief, Table, brief, frame_table
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.slot_table import slots_table
from kvprobe.errors import UserError
from kvprobe.exported import Exported
from kvprobe.models.geometry import felt
from kvprobe.names import unknown
from kvprobe.patching.grid import Cell
from kvprobe.patching.metrics import LEAST_WAY, UNDEFINED
from kvprobe.text.tokens import Decoder, token_texts
from kvprobe.tidy import chosen

VALUES = ("normalised", "effect", "value")
"""What a matrix of a sweep may hold."""


@dataclass(frozen=True, repr=False)
class PatchMap(Brief, Exported):
    """A metric with each cell patched.

    Attributes:
        cells: what was swapped.
        values: the metric of the base with each cell swapped.
        base: the metric of the base, unpatched.
        donor: the metric of the donor, unpatched.
        ledger: of the base's slots.
        reads: who sees what was swapped; see `kvprobe.patching.plan.Reads`.
        tokenizer: that gives tokens their text; None where the model has none.
        readers: the layers that read each layer's K and V, and so feel what is swapped there: itself alone, or others
            too where layers share them.
        least_way: base and donor that differ by no more give the same metric, up to rounding.
    """

    cells: tuple[Cell, ...]
    values: Float[np.ndarray, "cells"]
    base: float
    donor: float
    ledger: Ledger
    reads: str
    tokenizer: Decoder | None = field(default=None, compare=False, repr=False)
    readers: Mapping[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    least_way: float = field(default=LEAST_WAY, compare=False, repr=False)

    def _plain(self) -> Mapping[str, object]:
        slots = slots_table(self.ledger, self.tokenizer)
        return {"base": self.base, "donor": self.donor, "reads": self.reads, "slots": slots, "cells": self.df()}

    def _facts(self) -> Iterable[str]:
        parts = dict.fromkeys(cell.part for cell in self.cells)
        yield f"{len(self.cells)} cells over {' × '.join(self.cells[0].labels)} of {', '.join(parts)}"
        yield f"base={self.base:.4g}, donor={self.donor:.4g}, reads={self.reads!r}"
        yield from felt(self.readers)
        if not self.way:
            yield UNDEFINED
        if not np.isnan(self.effect).all():
            largest = int(np.nanargmax(np.abs(self.effect)))
            cell = self.cells[largest]
            yield f"largest effect {self.effect[largest]:+.4g} by {cell.part} of {brief(dict(cell.labels))}"

    @property
    def effect(self) -> Float[np.ndarray, "cells"]:
        """How far each cell moves the metric from the base."""
        return self.values - self.base

    @property
    def normalised(self) -> Float[np.ndarray, "cells"]:
        """The effect as a share of the way from base to donor: 0 is no effect, 1 the donor's value; NaN where base and
        donor do not differ."""
        return self.effect / self.way if self.way else np.full_like(self.values, np.nan)

    @property
    def way(self) -> float:
        """The way from base to donor; 0 where they do not differ, up to rounding."""
        way = self.donor - self.base
        return way if abs(way) > self.least_way else 0.0

    def _table(self) -> Table:
        """The cells, those of the largest effect first."""
        return frame_table(self.df().iloc[np.argsort(-np.abs(self.effect), kind="stable")])

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The text of each slot's token; none without a tokenizer."""
        return token_texts(self.ledger.tokens[0].tolist(), self.tokenizer)

    def slot_label(self, slot: int) -> str:
        """A slot for people: `" John" at 9 (T1)`."""
        segment = self.ledger.names[int(self.ledger.segments[0, slot])]
        text = f"{json.dumps(self.texts[slot], ensure_ascii=False)} at " if self.texts else ""
        return f"{text}{slot} ({segment})"

    def df(self) -> pd.DataFrame:
        """One row per cell: the grid's axes, `part`, `content`, `slots` (how many), `value`, `effect`, `normalised`;
        and for single slots their `token`, `text` (with a tokenizer), `position` and `segment`."""
        rows = [
            {**cell.labels, "part": cell.part, "content": cell.content, "slots": len(cell.slots)} for cell in self.cells
        ]
        table = pd.DataFrame(rows)
        if "slot" in table:
            slots = table["slot"].to_numpy()
            table["token"] = self.ledger.tokens[0].cpu().numpy()[slots]
            if self.tokenizer is not None:
                table["text"] = [self.texts[slot] for slot in slots]
            table["position"] = self.ledger.positions[0].cpu().numpy()[slots]
            names = self.ledger.segments[0].cpu().numpy()[slots]
            table["segment"] = [self.ledger.names[name] for name in names]
        return table.assign(value=self.values, effect=self.effect, normalised=self.normalised)

    def matrix(
        self, rows: str, columns: str, part: str | None = None, content: str = "full", value: str = "normalised"
    ) -> pd.DataFrame:
        """Two axes of the grid as a table of `normalised`, `effect` or `value`, each axis in the grid's own order.

        Slots are labelled with the text of their token and their segment.

        Args:
            part: such as V; needed where the sweep has several, unless `part` is one of the two axes.

        Raises:
            UserError: shares of the way where there is none, an axis that the grid does not have, a part, content or
                value that the sweep does not have, or cells that also differ in a third axis.
        """
        table = self.df()
        for column, wanted in (("part", part), ("content", content)):
            known = list(dict.fromkeys(table[column]))
            if wanted is None and len(known) > 1 and column not in (rows, columns):
                raise UserError(
                    f"The sweep has the parts {', '.join(known)}; say which one, such as part={known[-1]!r}."
                )
            if wanted is not None and wanted not in known:
                raise UserError(unknown(f"{column} in the sweep", wanted, known))
        cells = chosen(table, {"content": content} if part is None else {"content": content, "part": part})
        if value not in VALUES:
            raise UserError(unknown("value of a cell", value, VALUES))
        if value == "normalised" and not self.way:
            raise UserError(f"In this sweep {UNDEFINED}; take value='effect', or a donor that differs.")
        for axis in (rows, columns):
            if axis not in table:
                raise UserError(
                    f"The sweep has no axis {axis!r}; choose from {', '.join([*self.cells[0].labels, 'part'])}."
                )
        if len(set(zip(cells[rows], cells[columns], strict=True))) < len(cells):
            raise UserError(f"Cells of one {rows} and {columns} differ in another axis; sweep over these two alone.")
        order: dict[str, Sequence[object]] = {axis: list(dict.fromkeys(cells[axis])) for axis in (rows, columns)}
        wide = cells.pivot(index=rows, columns=columns, values=value)
        wide = wide.reindex(index=order[rows], columns=order[columns])
        for number, axis in enumerate((rows, columns)):
            if axis == "slot":
                wide = wide.rename(self.slot_label, axis=number)
        return wide
