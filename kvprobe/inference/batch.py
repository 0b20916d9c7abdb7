"""Rows of one decode batch whose K and V lie in buffers: a token adds a slot in place, a fault is written and undone in
place, and a row that has ended gives its place to another.
"""

from collections.abc import Sequence
from typing import Any

import psutil
import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from kvprobe.cache.cache import KVCache
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.faults.strike import Damage, strike
from kvprobe.inference.forward import new_slots
from kvprobe.models.hf_cache import past_key_values
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.text.transcript import Tokens


class Batch:
    """Rows of K and V in buffers, and their ledger.

    Attributes:
        ledger: of the slots that hold a token by now.
    """

    def __init__(self, lanes: Lanes, start: KVCache, rows: int, room: int) -> None:
        self.lanes = lanes
        pairs = zip(start.keys, start.values, strict=True)
        self.layers = [Buffer(keys, values, rows, start.slots + room) for keys, values in pairs]
        self.ledger = start.fork(rows).ledger
        self._damage: list[Damage] = []

    def strike(
        self,
        faults: Sequence[Fault],
        draws: Sequence[Draws],
        places: Sequence[int],
        context: FaultContext,
        step: int,
        transient: bool,
    ) -> Damage:
        """Write faults into these rows; what is transient until `undo`."""
        tensors = [layer.wide for layer in self.layers]
        damage = strike(faults, draws, places, tensors, self.ledger, context, step, remember=transient)
        self._damage.append(damage)
        return damage

    def undo(self) -> None:
        """Put back what transient faults overwrote."""
        for damage in reversed(self._damage):
            damage.undo()
        self._damage.clear()

    def read(self, tokens: Sequence[Tokens], lane: Lane) -> Float[Tensor, "rows vocab"]:
        """One token for each row."""
        new = new_slots(tokens, self.lanes.device)
        self.ledger = self.ledger.append(new)
        past = past_key_values(self.layers)
        with torch.no_grad():
            return self.lanes.forward(new.tokens, self.ledger, past, lane, logits_to_keep=1)[:, -1]

    def drop(self, leaving: Sequence[int]) -> list[int]:
        """Let rows go; where each row that stays stood before. Rows from the end take the places of those that leave, so
        that only as many are copied."""
        count = self.ledger.batch - len(leaving)
        order = list(range(self.ledger.batch))
        moving = iter([row for row in range(count, self.ledger.batch) if row not in leaving])
        for place in sorted(leaving):
            if place < count:
                order[place] = next(moving)
                for layer in self.layers:
                    layer.move(order[place], place)
        for layer in self.layers:
            layer.shrink(count)
        self.ledger = self.ledger.rows(torch.tensor(order[:count], dtype=torch.long, device=self.ledger.tokens.device))
        return order[:count]


class Buffer(DynamicLayer):
    """One layer's K and V, with room for tokens to come; what is handed out is a view of the slots that hold one.

    Attributes:
        wide: K and V with that room, contiguous.
    """

    def __init__(
        self,
        keys: Float[Tensor, "1 kv_heads slots d_head"],
        values: Float[Tensor, "1 kv_heads slots d_value"],
        rows: int,
        slots: int,
    ) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._held = keys.shape[2]
        self.wide = (
            keys.new_empty(rows, keys.shape[1], slots, keys.shape[3]),
            values.new_empty(rows, values.shape[1], slots, values.shape[3]),
        )
        for wide, tensor in zip(self.wide, (keys, values), strict=True):
            wide[:, :, : self._held] = tensor
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stop = self._held + key_states.shape[2]
        for wide, new in zip(self.wide, (key_states, value_states), strict=True):
            wide[:, :, self._held : stop] = new
        self._held = stop
        self._show()
        return self.keys, self.values

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for wide in self.wide:
            wide[target, :, : self._held] = wide[source, :, : self._held]

    def shrink(self, rows: int) -> None:
        """Forget all rows but the first."""
        keys, values = self.wide
        self.wide = (keys[:rows], values[:rows])
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (wide[:, :, : self._held] for wide in self.wide)


def fitting_rows(rows: int, cache: KVCache, room: int) -> int:
    """As many rows as were asked for, or half as many until they take at most half of the free memory."""
    slot = sum(tensor[:, :, :1].numel() * tensor.element_size() for tensor in cache.keys + cache.values)
    device = cache.keys[0].device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    while rows > 2 and rows * slot * (cache.slots + room) > free / 2:
        rows = max(2, rows // 2)
    return rows
