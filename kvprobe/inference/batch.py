"""Rows of one decode batch whose slots lie in buffers.

A token adds a slot in place, a fault is written and undone in place, and a row that has ended leaves the batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer, slots_and_writes
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import heads_apart
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Scope
from kvprobe.faults.strike import Damage, strike
from kvprobe.inference.forward import new_slots
from kvprobe.models.hf_cache import CacheLayer, layers_of, past_key_values
from kvprobe.models.lanes import Lanes
from kvprobe.models.loading import free_bytes
from kvprobe.models.recurrent import StateLayer
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import Tokens


class Batch:
    """Rows of slots in buffers, and their ledger.

    Attributes:
        lanes: the model.
        layers: one buffer per layer.
        ledger: of the slots so far.
    """

    def __init__(self, lanes: Lanes, starts: Sequence[KVCache], rows: Sequence[int], room: int) -> None:
        """Copies of caches of one row, padded at the beginning to the longest.

        Args:
            rows: how many copies of each cache.
            room: slots for later tokens.
        """
        self.lanes = lanes
        slots = max(start.slots for start in starts)
        layers = zip(*(start.layers for start in starts), strict=True)
        self.layers = [Buffer(those, rows, slots, room) for those in layers]
        self._first = [slots - start.slots for start in starts]
        """The slot at which each cache begins."""
        forks = [start.fork(count).ledger for start, count in zip(starts, rows, strict=True)]
        self.ledger = Ledger.join([ledger.padded(slots, at_end=False) for ledger in forks])
        self._damage: list[Damage] = []

    def strike(
        self,
        cache: int,
        faults: Sequence[Fault],
        draws: Sequence[Draws],
        places: Sequence[int],
        context: FaultContext,
        step: int,
        transient: bool,
    ) -> Damage:
        """Write faults into these rows, copies of the cache of this number; transient ones last until `undo`."""
        first = self._first[cache]
        layers, ledger = [layer.wide for layer in self.layers], self.ledger.since(first)
        damage = strike(faults, draws, places, layers, ledger, context, step, first=first, remember=transient)
        self._damage.append(damage)
        return damage

    def hide(self, row: int, cache: int, scope: Scope, draws: Draws) -> int:
        """Hide slots from a row, a copy of the cache of this number, in the layers and heads of a scope; gives how many
        vectors that were."""
        first, shape = self._first[cache], (len(self.layers), heads_apart(self.lanes.geometry.layers))
        hidden = scope.struck(scope.order(self.ledger.since(first), shape, draws, 0, row), shape)
        live = self.ledger.live.expand(shape[0], -1, max(self.ledger.live.shape[2], hidden.shape[1]), -1).clone()
        live[:, row, :, first:] &= ~hidden
        self.ledger = replace(self.ledger, live=live)
        heads = [sum(wide.shape[1] for wide in layer.wide.values()) // hidden.shape[1] for layer in self.layers]
        return sum(int(of_layer.sum()) * count for of_layer, count in zip(hidden, heads, strict=True))

    def undo(self) -> None:
        """Restore what transient faults overwrote."""
        for damage in reversed(self._damage):
            damage.undo()
        self._damage.clear()

    def decode(self, tokens: Sequence[Tokens], lane: Lane) -> Float[Tensor, "rows vocab"]:
        """Read one token for each row, and return the logits after it."""
        new = new_slots(tokens, self.lanes.device)
        lives, padding, states = self.ledger.live[:, :, 0], self.ledger.padding, dict[int, StateLayer]()
        self.ledger = self.ledger.read_on(new)

        def state(number: int) -> StateLayer:
            _, writes = slots_and_writes(self.layers[number].shown)
            states[number] = StateLayer(writes, lives[number if len(lives) > 1 else 0], padding)
            return states[number]

        layers = layers_of(self.lanes.geometry.parts, lambda number: BufferLayer(self.layers[number]), state)
        with torch.no_grad():
            logits = self.lanes.forward(new.tokens, self.ledger, past_key_values(layers), lane, logits_to_keep=1)
        for number, layer in enumerate(self.layers):
            if number in states:
                layer.write(states[number].written)
            layer.show(self.ledger.slots)
            if number in states:
                states[number].remembered(slots_and_writes(layer.shown)[1])
        return logits[:, -1]

    def drop(self, leaving: Sequence[int]) -> list[int]:
        """Remove rows, and return the former index of each row that stays.

        Rows from the end move to the places of those that leave, so that only as many are copied.
        """
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


class Buffer:
    """What one layer stores, with room for later tokens.

    Attributes:
        wide: its parts of all slots, room included, contiguous.
        shown: views of the slots that hold a token.
    """

    def __init__(self, starts: Sequence[Layer], rows: Sequence[int], slots: int, room: int) -> None:
        """Copies of the layers of one row, which end at the same slot.

        Args:
            rows: how many copies of each.
            slots: that hold a token so far.
            room: slots for later tokens.
        """

        def wide(tensors: Sequence[Tensor]) -> Tensor:
            _, heads, _, size = tensors[0].shape
            # Padding is zeros: what an empty tensor holds may be NaN, and 0 · NaN is NaN in masked slots too.
            buffer = tensors[0].new_zeros(sum(rows), heads, slots + room, size)
            row = 0
            for tensor, count in zip(tensors, rows, strict=True):
                buffer[row : row + count, :, slots - tensor.shape[2] : slots] = tensor
                row += count
            return buffer

        self.wide: Layer = {name: wide([start[name] for start in starts]) for name in starts[0]}
        self.show(slots)

    def show(self, slots: int) -> None:
        """Let so many slots hold a token."""
        self._held = slots
        self.shown: Layer = {name: wide[:, :, :slots] for name, wide in self.wide.items()}

    def write(self, new: Layer) -> tuple[Tensor, ...]:
        """Write these parts of the next slot, and give them whole; `show` makes them hold a token."""
        for name, tensor in new.items():
            self.wide[name][:, :, self._held : self._held + 1] = tensor
        return tuple(self.wide[name][:, :, : self._held + 1] for name in new)

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for wide in self.wide.values():
            wide[target, :, : self._held] = wide[source, :, : self._held]

    def shrink(self, rows: int) -> None:
        """Keep only the first rows."""
        self.wide = {name: wide[:rows] for name, wide in self.wide.items()}
        self.show(self._held)


class BufferLayer(CacheLayer):
    """One layer of a Hugging Face cache whose parts lie in a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        slots, _ = slots_and_writes(buffer.shown)
        super().__init__([*slots.values()])
        self._buffer, self._names = buffer, [*slots]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        new = zip(self._names, (key_states, value_states), strict=False)
        self.keys, self.values = self._buffer.write(dict(new))
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        (index,) = self._buffer.write({self._names[2]: indexer_key_states[:, None]})
        self.indexer_keys = index[:, 0]
        return self.indexer_keys


def fitting_rows(rows: int, cache: KVCache, room: int) -> int:
    """The number of rows asked for, halved until they take at most half of the free memory."""
    slot = sum(tensor[:, :, :1].numel() * tensor.element_size() for tensor in cache.tensors)
    free = free_bytes(cache.tensors[0].device)
    while rows > 2 and rows * slot * (cache.slots + room) > free / 2:
        rows = max(2, rows // 2)
    return rows
