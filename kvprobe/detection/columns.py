"""Columns of a cache computed anew: of tokens alone in the first layers, and of a few slots from those before them.

A token that sees nothing but itself has K and V that are functions of the token, in every layer. In layer 0 they are so
in any text. A slot's column, all layers of it, is a function of its token and the columns before it, so that a column
computed anew from the cache equals the stored one, unless this or one before was changed.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import Ledger
from kvprobe.inference.forward import new_slots
from kvprobe.models.gate import FIRST_REACH, FIRST_ROWS
from kvprobe.models.hf_cache import CacheLayer, past_key_values
from kvprobe.models.lanes import Lanes
from kvprobe.text.tokens import Tokens

SPOTS = 2 * FIRST_ROWS
"""Slots whose columns are computed anew."""


class _EnoughError(Exception):
    """The layers that were wanted are computed."""


Pair = tuple[Tensor, Tensor]


class _Watching(CacheLayer):
    """A layer that holds what `read` gives for what is added to it, and keeps what is added; the `last` one ends the
    pass."""

    def __init__(self, read: Callable[[Pair], Sequence[Tensor]] | None, slots: int, last: bool = False) -> None:
        super().__init__()
        self.read, self.slots, self.last = read, slots, last
        self.added: Pair | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.added = (key_states, value_states)
        held = self.read(self.added) if self.read else ()
        if self.last:
            raise _EnoughError
        if not held:
            return self.added
        keys, values = (torch.cat([before, new], 2) for before, new in zip(held, self.added, strict=True))
        return keys, values

    def get_seq_length(self) -> int:
        return self.slots


def computable(lanes: Lanes) -> bool:
    """Whether columns of this model can be computed anew: no layer keeps a state, and no index chooses slots."""
    return not (lanes.geometry.recurrent or lanes.geometry.indexed) and all(lanes.geometry.layers)


def lone_columns(
    lanes: Lanes, tokens: Int[Tensor, "slots"], positions: Int[Tensor, "slots"], depth: int
) -> list[tuple[Float[Tensor, "heads slots d"], ...]]:
    """The parts of the first `depth` layers of each token that sees itself alone."""
    pairs, where = torch.stack([tokens, positions]).unique(dim=1, return_inverse=True)
    chunks: list[list[tuple[Tensor, ...]]] = []
    for some in pairs.split(FIRST_REACH, 1):
        ledger = new_slots([Tokens.of(some[0].tolist())], lanes.device)
        ledger = replace(ledger, positions=some[1][None], origins=some[1][None], live=ledger.live & False)
        layers = [_Watching(None, 0, number == depth - 1) for number in range(lanes.geometry.n_layers)]
        with torch.no_grad(), suppress(_EnoughError):
            lanes.forward(some[:1], ledger, past_key_values(layers), logits_to_keep=1)
        chunks.append([tuple(part[0].float() for part in layer.added or ()) for layer in layers[:depth]])
    return [
        tuple(torch.cat(parts, 1)[:, where] for parts in zip(*(chunk[layer] for chunk in chunks), strict=True))
        for layer in range(depth)
    ]


def unedited(ledger: Ledger, row: int) -> int:
    """How many slots of a row come first that nothing was done to: of these, columns can be computed anew."""
    index = torch.arange(ledger.slots, device=ledger.positions.device)
    sound = ledger.live[:, row].all(1).all(0) & ~ledger.recomputed[row] & ~ledger.padding[row]
    sound = sound & (ledger.positions[row] == index) & (ledger.origins[row] == index)
    return int(sound.int().cumprod(0).sum())


def spots_of(slots: int) -> list[int]:
    """Slots to compute anew: the first ones, the last ones, which see most, and others evenly between."""
    few = SPOTS // 4
    between = torch.linspace(few, slots - few, 2 * few + 2).tolist()[1:-1] if slots > SPOTS else range(slots)
    chosen = {*range(few), *map(round, between), *range(slots - few, slots)}
    return sorted(slot for slot in chosen if 0 <= slot < slots)


def read_at_spots(
    lanes: Lanes,
    ledger: Ledger,
    spots: Sequence[tuple[int, int]],
    layer: Callable[[int, Sequence[Float[Tensor, "heads spots d"]]], Layer],
) -> None:
    """Compute the parts of each layer at these slots anew, from the slots before them.

    Args:
        spots: pairs of a row and a slot.
        layer: gives the stored layer of a number, once, when the model comes to it; it is handed what was computed
            there.
    """
    device = lanes.device
    by_row: dict[int, list[int]] = {}
    for row, slot in spots:
        by_row.setdefault(row, []).append(slot)
    runs = [
        replace(Tokens.of([int(ledger.tokens[row, slot]) for slot in slots]), positions=tuple(slots))
        for row, slots in by_row.items()
    ]
    new, rows = new_slots(runs, device), torch.tensor([*by_row], device=device)
    last, count = int(new.positions.max()), new.slots
    held = torch.arange(last, device=device)
    before = ledger.to(device).rows(rows)
    before = before.take(held.expand(len(rows), -1), before.padding[:, :last])
    # A column sees the slots before it as they are stored, and none of the others that are computed anew.
    later = held >= new.positions[:, :, None]
    others = ~torch.eye(count, dtype=torch.bool, device=device).expand(len(rows), -1, -1)
    places = [[*by_row].index(row) for row, _ in spots], [by_row[row].index(slot) for row, slot in spots]

    def read(number: int, added: Pair) -> Sequence[Tensor]:
        held = layer(number, [part.transpose(1, 2)[places].transpose(0, 1).float() for part in added])
        return [part[:, :, :last].to(device, lanes.dtype)[rows] for part in held.values()]

    n_layers = lanes.geometry.n_layers
    layers: list[Any] = [_Watching(partial(read, number), last, number == n_layers - 1) for number in range(n_layers)]
    past, hidden = past_key_values(layers), torch.cat([later, others], -1)
    with torch.no_grad(), suppress(_EnoughError):
        lanes.forward(new.tokens, before.append(new), past, logits_to_keep=1, hidden=hidden)
