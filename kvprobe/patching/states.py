"""The states of recurrent layers in a pass of many rows: of the base, and of the base with what cells swap.

Of a cell that swaps what tokens wrote, the state is folded again with the donor's writes in its slots; all other rows
start from the base's state. The rows of a layer are put together when it is reached, and no longer than that.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer, slots_and_writes
from kvprobe.cache.parts import WRITES
from kvprobe.inference.capture import editing_hook
from kvprobe.inference.forward import TapLayer
from kvprobe.models.hf_cache import BothLayer, layers_of, past_key_values
from kvprobe.models.hooks import hooked
from kvprobe.models.lanes import Lanes
from kvprobe.models.recurrent import StateLayer, writes_noted
from kvprobe.patching.grid import Cell, stored_parts
from kvprobe.patching.rows import Rows

Patched = Sequence[tuple[int, Cell]]
"""Cells with their rows."""


class States:
    """The states after a base, and after it with cells swapped.

    Args:
        base: one row.
        contents: what cells may hold instead, by `Cell.content`; each on the base's slots.
    """

    def __init__(self, lanes: Lanes, base: KVCache, contents: Mapping[str, KVCache]) -> None:
        self.lanes, self.base, self.contents = lanes, base, contents
        self._of_base: dict[int, StateLayer] = {}

    @property
    def row_bytes(self) -> int:
        """What a row takes at its widest: a fold of all that was written, and a state before and after."""
        widest = 0
        for layer in self.lanes.geometry.recurrent:
            parts = {part.name: part for part in self.lanes.geometry.layers[layer] if part.name in WRITES}
            numbers = self.base.slots * sum(part.heads * part.numbers for part in parts.values())
            if "value" in parts:
                numbers += 2 * parts["value"].heads * parts["value"].numbers * parts["key"].numbers
            widest = max(widest, 4 * 4 * numbers)
        return widest

    @contextmanager
    def given(self, rows: Rows, by_layer: Mapping[int, Patched]) -> Generator[DynamicCache | None]:
        """While this lasts, the cache that gives each recurrent layer of the plain lane the states of its rows; None
        where there is no such layer.

        Args:
            by_layer: for each layer the cells that swap something there.
        """
        geometry = self.lanes.geometry
        if not geometry.recurrent:
            yield None
            return
        ahead = layers_of(geometry.parts, lambda _: TapLayer(store=False), self._base)
        past: Any = past_key_values(ahead)

        def begin(layer: int, hidden: Tensor) -> Tensor:
            state = self._of_rows(layer, rows.until(layer), by_layer.get(layer, ()))
            both = isinstance(ahead[layer], BothLayer)
            past.layers[:] = ahead
            past.layers[layer] = BothLayer(TapLayer(store=False), state) if both else state
            return hidden

        blocks = self.lanes.blocks
        hooks = [editing_hook(blocks[layer], "input", partial(begin, layer)) for layer in geometry.recurrent]
        with writes_noted(self.lanes.recurrent_modules), hooked(hooks):
            yield past

    def _base(self, layer: int) -> StateLayer:
        if layer not in self._of_base:
            self._of_base[layer] = self._folded(layer, slots_and_writes(self.base.layers[layer])[1])
        return self._of_base[layer]

    def _of_rows(self, layer: int, count: int, patched: Patched) -> StateLayer:
        """What a layer starts from in so many rows."""
        cells = {row: cell for row, cell in patched if not {*stored_parts(cell.part)}.isdisjoint(WRITES)}
        which = torch.zeros(count, dtype=torch.long, device=self.lanes.device)
        which[list(cells)] = torch.arange(1, len(cells) + 1, device=self.lanes.device)
        swapped = self._folded(layer, self._swapped(layer, [*cells.values()])) if cells else None
        return self._base(layer).of_rows(swapped, which)

    def _swapped(self, layer: int, cells: Sequence[Cell]) -> Layer:
        """What was written at a layer, in one row for each cell."""
        base = slots_and_writes(self.base.layers[layer])[1]
        rows = {name: tensor.repeat(len(cells), 1, 1, 1) for name, tensor in base.items()}
        for row, cell in enumerate(cells):
            slots = torch.tensor(cell.slots, device=self.lanes.device)
            for name in {*stored_parts(cell.part)}.intersection(rows):
                rows[name][row, :, slots] = self.contents[cell.content].layers[layer][name][0, :, slots]
        return rows

    def _folded(self, layer: int, writes: Layer) -> StateLayer:
        rows, ledger = len(writes["conv"]), self.base.ledger
        live = ledger.live[layer if len(ledger.live) > 1 else 0, :, 0]
        return StateLayer(writes, live.expand(rows, -1), ledger.padding.expand(rows, -1))
