"""Caches of transformers, in and out. What cannot be proved to be the same is refused.

A transformers cache has no positions, tokens or masks of its own. On the way in, the tokens are given beside it, and
the model reads some of them again: the keys and values of layer 0 depend on token and position alone, so a cache of
other tokens, or at other positions, is noticed. On the way out, every slot must be live and at the position of its
index, because that is what transformers will assume.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.forward import as_seen, new_slots, prefill, refuse_foreign
from kvprobe.inference.readable import require_type
from kvprobe.models.hf_cache import CacheLayer, past_key_values
from kvprobe.models.lanes import Lanes
from kvprobe.text.tokens import Tokens

READ_AGAIN = 16
"""Slots of each row that are read again."""
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far a vector that is read again may be off, relative to its length."""


def from_hf(lanes: Lanes, past: Cache, tokens: Sequence[Tokens]) -> KVCache:
    """A transformers cache as kvprobe's.

    Slots that a sliding-window layer has dropped are not live in that layer: no later query could see them.

    Args:
        tokens: of its slots, a run for each row; all rows are of one length.

    Raises:
        UserError: the cache is of another kind than `DynamicCache` with full and sliding layers, of another model, or
            not of these tokens at these positions.
    """
    require_type("The cache", past, Cache, "a cache of transformers")
    if not past.layers:
        raise UserError("The cache has no layer yet; read a text with it first.")
    layers: list[Any] = [*past.layers]  # some kinds of layers, refused below, have no keys
    for number, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UserError(
                f"Layer {number} of the cache is a {type(layer).__name__}, which keeps a state in place "
                "of slots; give the cache of a model whose layers all have full or sliding-window attention."
            )
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, CacheLayer):
            raise UserError(
                f"Layer {number} of the cache is a {type(layer).__name__}; kvprobe reads full and sliding layers of a "
                "DynamicCache, so generate with one."
            )
        if not layer.is_initialized:
            raise UserError(f"Layer {number} of the cache is empty; read a text with it first.")
    count = len(tokens[0])
    _refuse_other_counts(layers, tokens, count)
    ledger = new_slots(tokens, lanes.device)
    missing = [count - layer.keys.shape[2] for layer in layers]
    _refuse_gaps(lanes, missing, count)
    dropped = torch.tensor(missing, device=lanes.device)
    if any(missing):
        held = torch.arange(count, device=lanes.device) >= dropped[:, None]
        ledger = replace(ledger, live=held[:, None, None].expand(-1, len(tokens), -1, -1).clone())
    keys = tuple(_padded(layer.keys, count) for layer in layers)
    values = tuple(_padded(layer.values, count) for layer in layers)
    cache = KVCache(keys, values, ledger, lanes.maker)
    refuse_foreign(lanes, cache)
    cache.refuse_nonfinite()
    _refuse_other_tokens(lanes, cache, tokens, missing[0])
    return cache


def to_hf(lanes: Lanes, cache: KVCache) -> DynamicCache:
    """A cache as transformers' `DynamicCache`, whose next token stands at the position of its length.

    Raises:
        UserError: the cache is of another model, or has slots that are not live or not at the position of their index.
    """
    require_type("The cache", cache, KVCache, "a KVCache, such as Model.prefill returns")
    refuse_foreign(lanes, cache)
    if not cache.ledger.untouched or bool((cache.ledger.following != cache.slots).any()):
        raise UserError(
            "The cache has slots that are masked, padding, or not at the position of their index, which a cache of "
            "transformers cannot say; evict what is hidden and re-index the rest: cache.evict(…).reindex()."
        )
    seen, layers = as_seen(lanes, cache), list[CacheLayer]()
    for keys, values in zip(seen.keys, seen.values, strict=True):
        layer = CacheLayer()
        layer.update(keys.clone(), values.clone())
        layers.append(layer)
    return past_key_values(layers)


def _refuse_other_counts(layers: Sequence[Any], tokens: Sequence[Tokens], count: int) -> None:
    if any(len(row) != count for row in tokens):
        raise UserError("The rows of the cache have unequal lengths, so some are padded; give a cache of one row each.")
    for number, layer in enumerate(layers):
        rows, length = layer.keys.shape[0], layer.get_seq_length()
        if (rows, length) != (len(tokens), count):
            raise UserError(
                f"Layer {number} of the cache has read {length} tokens in {rows} rows, but {count} in {len(tokens)} "
                "were given; give the tokens that it read (the last generated one is not among them)."
            )


def _refuse_gaps(lanes: Lanes, missing: Sequence[int], count: int) -> None:
    """Refuse a cache that lacks slots which the model's own window still sees."""
    for number, (lacking, window) in enumerate(zip(missing, lanes.geometry.windows, strict=False)):
        if lacking > (0 if window is None else max(0, count - window + 1)):
            raise UserError(
                f"Layer {number} of the cache lacks {lacking} of {count} slots, and the model would see some of them; "
                "make the cache with DynamicCache(config=model.config)."
            )


def _refuse_other_tokens(lanes: Lanes, cache: KVCache, tokens: Sequence[Tokens], first: int) -> None:
    """Refuse a cache whose layer 0 is not of these tokens; `first` is the first slot that the layer still holds."""
    count = cache.slots
    step = max(1, (count - first) // READ_AGAIN)
    places = sorted({*range(first, count, step), count - 1})
    chosen = [_at(row, places) for row in tokens]
    again = prefill(lanes, chosen)
    for name, held, read in (("keys", cache.keys, again.keys), ("values", cache.values, again.values)):
        error = (read[0].float() - held[0][:, :, places].float()).square().sum(-1)
        off = error > CLOSE.get(lanes.dtype, 1e-3) ** 2 * read[0].float().square().sum(-1)
        if bool(off.any()):
            slot = places[int(off.any(1).any(0).int().argmax())]
            raise UserError(
                f"The {name} of layer 0 at slot {slot} are not those of the token that was given for it, at its "
                "position; give the tokens that the cache was made from, at their positions."
            )


def _at(row: Tokens, places: Sequence[int]) -> Tokens:
    """The tokens at these places, at their own positions."""
    pieces = [row[place : place + 1] for place in places]
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    return whole


def _padded(tensor: Float[Tensor, "batch kv_heads held d"], count: int) -> Float[Tensor, "batch kv_heads slots d"]:
    """A copy with zeros for the slots that the layer has dropped."""
    return torch.nn.functional.pad(tensor, (0, 0, count - tensor.shape[2], 0)).clone()
