"""Which slots each query may attend to, from the ledger: causal by slot order, windows by position, never by length."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.ledger import Ledger


def visible(
    ledger: Ledger, queries: int | Int[Tensor, "queries"], window: int | None = None
) -> Bool[Tensor, "layers batch kv_heads queries slots"]:
    """Which slots each query may attend to: each of the last `queries` slots, or of the slots at these indices.

    A query sees the live slots before it, and always itself, so that no row of the mask is empty (padding included).
    Causality follows slot order. A sliding `window` follows position, as in training: a slot is out of reach when its
    position is `window` or more behind the query's, however few slots are between them.
    """
    slots = torch.arange(ledger.slots, device=ledger.tokens.device)
    query_slots = slots[ledger.slots - queries :] if isinstance(queries, int) else queries
    seen = ledger.live[:, :, :, None, :] & (slots < query_slots[:, None])
    if window is not None:
        distance = ledger.positions[:, query_slots, None] - ledger.positions[:, None, :]
        seen = seen & (distance < window)[None, :, None]
    return seen | (slots == query_slots[:, None])


def visible_by_layer(
    ledger: Ledger, queries: int | Int[Tensor, "queries"], windows: Sequence[int | None]
) -> list[Bool[Tensor, "batch kv_heads queries slots"]]:
    """Which slots each query may attend to in each layer, from the layers' windows; see `visible`. Layers that see the
    same slots share one tensor."""
    by_window = {window: list(visible(ledger, queries, window)) for window in dict.fromkeys(windows)}
    return [by_window[window][layer if ledger.live.shape[0] > 1 else 0] for layer, window in enumerate(windows)]


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
