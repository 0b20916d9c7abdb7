"""What the rows of a pass read beside K and V: states of recurrent layers, and keys of an index, with what cells swap.

Of a cell that swaps what tokens wrote, the state is folded again with the donor's writes in its slots; all other rows
start from the base's state. Where a cell swaps keys of an index, the donor's stand in its slots, and in every row the
index chooses anew, by its own queries. The rows of a layer are put together when it is reached, for as long as that.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer, slots_and_writes
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import INDEX, WRITES
from kvprobe.inference.capture import editing_hook
from kvprobe.inference.forward import TapLayer
from kvprobe.models.hf_cache import CACHE, BothLayer, layers_of, past_key_values
from kvprobe.models.hooks import hooked
from kvprobe.models.lanes import Lanes
from kvprobe.models.masks import masks_given
from kvprobe.models.recurrent import StateLayer, writes_noted
from kvprobe.patching.grid import Cell, stored_parts
from kvprobe.patching.rows import Rows

Patched = Sequence[tuple[int, Cell]]
"""Cells with their rows."""


class Memories:
    """The states and keys of an index after a base, and after it with cells swapped.

    Args:
        base: one row.
        contents: what cells may hold instead, by `Cell.content`; each on the base's slots.
        ledger: of the base and what is read after it.
    """

    def __init__(self, lanes: Lanes, base: KVCache, contents: Mapping[str, KVCache], ledger: Ledger) -> None:
        self.lanes, self.base, self.contents, self.ledger = lanes, base, contents, ledger
        self.indexed = [layer for layer, names in enumerate(lanes.geometry.parts) if INDEX in names]
        self._of_base: dict[int, StateLayer] = {}

    @property
    def row_bytes(self) -> int:
        """What a row takes at its widest: a fold of all that was written, and a state before and after; or index keys,
        and scores in each head of the index."""
        indices = [part for layer in self.lanes.geometry.layers for part in layer if part.name == INDEX]
        heads = getattr(self.lanes.plain.config.get_text_config(), "index_n_heads", 0)
        queries = self.ledger.slots - self.base.slots
        widest = max((8 * self.ledger.slots * (part.numbers + heads * queries) for part in indices), default=0)
        for layer in self.lanes.geometry.recurrent:
            parts = {part.name: part for part in self.lanes.geometry.layers[layer] if part.name in WRITES}
            numbers = self.base.slots * sum(part.heads * part.numbers for part in parts.values())
            if "value" in parts:
                numbers += 2 * parts["value"].heads * parts["value"].numbers * parts["key"].numbers
            widest = max(widest, 4 * 4 * numbers)
        return widest

    @contextmanager
    def given(self, rows: Rows, by_layer: Mapping[int, Patched]) -> Generator[dict[str, Any]]:
        """While this lasts, the arguments by which the plain lane reads the memories of its rows; none where all layers
        have K and V alone.

        Args:
            by_layer: for each layer the cells that swap something there.
        """
        geometry = self.lanes.geometry
        layers = sorted({*geometry.recurrent, *self.indexed})
        if not layers:
            yield {}
            return
        ahead = layers_of(geometry.parts, lambda _: TapLayer(store=False), self._base)
        past: Any = past_key_values(ahead)

        def begin(layer: int, hidden: Tensor) -> Tensor:
            count, patched = rows.until(layer), by_layer.get(layer, ())
            slots = self._index_of_rows(layer, count, patched) if layer in self.indexed else TapLayer(store=False)
            past.layers[:] = ahead
            past.layers[layer] = slots
            if layer in geometry.recurrent:
                state = self._state_of_rows(layer, count, patched)
                past.layers[layer] = BothLayer(slots, state) if isinstance(ahead[layer], BothLayer) else state
            return hidden

        lanes = self.lanes
        hooks = [editing_hook(lanes.blocks[layer], "input", partial(begin, layer)) for layer in layers]
        arguments: dict[str, Any] = {CACHE: past, "use_cache": True}
        # An index chooses by the mask that the model is given.
        masks = lanes.masks(self.ledger, self.ledger.slots - self.base.slots) if self.indexed else None
        if masks is not None:
            arguments["attention_mask"] = masks[0]
        with writes_noted(lanes.recurrent_modules), hooked(hooks), masks_given(lanes.attention_modules, masks):
            yield arguments

    def _base(self, layer: int) -> StateLayer:
        if layer not in self._of_base:
            self._of_base[layer] = self._folded(layer, slots_and_writes(self.base.layers[layer])[1])
        return self._of_base[layer]

    def _state_of_rows(self, layer: int, count: int, patched: Patched) -> StateLayer:
        """What a layer starts from in so many rows."""
        writes = slots_and_writes(self.base.layers[layer])[1]
        which, swapped = self._swapped(layer, count, patched, writes)
        return self._base(layer).of_rows(self._folded(layer, swapped) if swapped else None, which)

    def _index_of_rows(self, layer: int, count: int, patched: Patched) -> TapLayer:
        """A layer that attends to what is read alone, by kvprobe's attention, and whose index has the keys of so many
        rows."""
        base = {INDEX: self.base.layers[layer][INDEX]}
        which, swapped = self._swapped(layer, count, patched, base)
        keys = torch.cat([base[INDEX], swapped[INDEX]]) if swapped else base[INDEX]
        return TapLayer.of_index(keys[which])

    def _swapped(
        self, layer: int, count: int, patched: Patched, base: Mapping[str, Tensor]
    ) -> tuple[Int[Tensor, "rows"], Mapping[str, Tensor] | None]:
        """These parts of a layer in one row for each cell that swaps some of them, if any does; and of which of them
        each row of the pass is, counted from 1, or 0 where it is the base's."""
        cells = {row: cell for row, cell in patched if not base.keys().isdisjoint(stored_parts(cell.part))}
        which = torch.zeros(count, dtype=torch.long, device=self.lanes.device)
        if not cells:
            return which, None
        which[list(cells)] = torch.arange(1, len(cells) + 1, device=self.lanes.device)
        rows = {name: tensor.repeat(len(cells), 1, 1, 1) for name, tensor in base.items()}
        for row, cell in enumerate(cells.values()):
            slots = torch.tensor(cell.slots, device=self.lanes.device)
            for name in {*stored_parts(cell.part)}.intersection(rows):
                rows[name][row, :, slots] = self.contents[cell.content].layers[layer][name][0, :, slots]
        return which, rows

    def _folded(self, layer: int, writes: Layer) -> StateLayer:
        rows, ledger = len(writes["conv"]), self.base.ledger
        live = ledger.live[layer if len(ledger.live) > 1 else 0, :, 0]
        return StateLayer(writes, live.expand(rows, -1), ledger.padding.expand(rows, -1))
