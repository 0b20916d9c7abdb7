"""Which slots each query may attend to, from the ledger: causal by slot order, windows and chunks by position, never by
length."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError


@dataclass(frozen=True)
class Chunk:
    """A layer whose queries see the slots of their own chunk of so many positions alone (Llama 4)."""

    positions: int


Reach = int | Chunk | None
"""How far a layer sees: a sliding window in positions, a chunk, or everything."""


def visible(
    ledger: Ledger, queries: int | Int[Tensor, "queries"], reach: Reach = None
) -> Bool[Tensor, "layers batch kv_heads queries slots"]:
    """Which slots each query may attend to: each of the last `queries` slots, or of the slots at these indices.

    A query sees the live slots before it, and always itself, so that no row of the mask is empty (padding included).
    Causality follows slot order. A sliding window and a chunk follow position, as in training: a slot is out of reach
    of a window when its position is as many or more behind the query's, however few slots are between them.
    """
    slots = torch.arange(ledger.slots, device=ledger.tokens.device)
    query_slots = slots[ledger.slots - queries :] if isinstance(queries, int) else queries
    seen = ledger.live[:, :, :, None, :] & (slots < query_slots[:, None])
    if reach is not None:
        near = _near(ledger.positions[:, query_slots, None], ledger.positions[:, None, :], reach)
        seen = seen & near[None, :, None]
    return seen | (slots == query_slots[:, None])


def refuse_dropped(what: str, ledger: Ledger, where: Bool[Tensor, "batch slots"] | None = None) -> None:
    """Refuse slots of which some layers hold nothing, since they had left their windows.

    Args:
        what: what needs them, to begin a sentence with.
        where: which of the live ones it needs; all by default.

    Raises:
        UserError: one of them is such a slot.
    """
    missing = ledger.dropped & ledger.live_somewhere
    missing = missing if where is None else missing & where
    if bool(missing.any()):
        row, slot = map(int, missing.nonzero()[0])
        raise UserError(
            f"{what} needs slot {slot} of row {row} in all layers, and those that slide over a window had dropped it "
            "when the cache was saved; go on where it ended, with gaps left open, or read the text again."
        )


def refuse_dropped_within(what: str, ledger: Ledger, at: Int[Tensor, "batch"], reaches: Sequence[Reach]) -> None:
    """Refuse to go on at these positions where a window would hold slots that it had left; see `refuse_dropped`."""
    if bool(ledger.dropped.any()):
        queries, slots = at[:, None, None], ledger.positions[:, None]
        for reach in {reach for reach in reaches if reach is not None} or {None}:
            refuse_dropped(what, ledger, None if reach is None else _near(queries, slots, reach)[:, 0])


def _near(
    at: Int[Tensor, "batch queries 1"], slots: Int[Tensor, "batch 1 slots"], reach: int | Chunk
) -> Bool[Tensor, "batch queries slots"]:
    """Which slots are within reach of each query, by their positions."""
    return at // reach.positions == slots // reach.positions if isinstance(reach, Chunk) else at - slots < reach


def visible_by_layer(
    ledger: Ledger, queries: int | Int[Tensor, "queries"], reaches: Sequence[Reach]
) -> list[Bool[Tensor, "batch kv_heads queries slots"]]:
    """Which slots each query may attend to in each layer, from how far each sees; see `visible`. Layers that see alike
    share one tensor."""
    by_reach = {reach: list(visible(ledger, queries, reach)) for reach in dict.fromkeys(reaches)}
    return [by_reach[reach][layer if ledger.live.shape[0] > 1 else 0] for layer, reach in enumerate(reaches)]


def additive(
    seen: Bool[Tensor, "batch kv_heads queries slots"], groups: int, dtype: torch.dtype
) -> Float[Tensor, "batch heads queries slots"]:
    """A mask to add to attention scores: 0 where seen, elsewhere the lowest number of the dtype.

    Args:
        groups: query heads per KV head; a mask that differs between KV heads is repeated for each.
    """
    if seen.shape[1] > 1:
        seen = seen.repeat_interleave(groups, 1)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
