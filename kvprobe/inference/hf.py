"""Caches of transformers, in and out. What cannot be proved to be the same is refused.

A transformers cache has no positions, tokens or masks of its own. On the way in, the tokens are given beside it, with
the attention mask and positions under which they were read, and the model reads them all again: every key and value
that is taken over must be what it reads. On the way out, every slot must be live and at the position of its index,
because that is what transformers will assume.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import vectors_apart
from kvprobe.cache.entries import entries
from kvprobe.cache.floors import Kept, NoiseFloor, floor_of_dtype
from kvprobe.cache.layer import slots_and_writes
from kvprobe.cache.parts import attends, recurrent
from kvprobe.cache.places import Distances, damage_of, distances_between
from kvprobe.cache.recurrence import last_inputs
from kvprobe.errors import UserError
from kvprobe.inference.forward import as_seen, at_slots, new_slots, of_held, prefill, refuse_foreign
from kvprobe.models.hf_cache import CacheLayer, held_by, past_key_values
from kvprobe.models.lanes import Lanes
from kvprobe.models.recurrent import StateLayer
from kvprobe.text.tokens import Tokens

_STATES: Mapping[str, Kept] = {"step": "delta rule", "gain": "Mamba-2"}
"""The rule by which a layer keeps a state, by what it alone stores."""
_BLOCK = 16
"""Slots whose median is held against a limit, too."""
NEAR, FAR = 8, 0.7
"""In half precision a router may choose other experts for a few slots. So the median of so many neighbours counts, and
any vector may be off by `FAR`: of 240 sound pairs of three tiny mixtures in bfloat16 none had a vector off by more than
0.66, or such a median off by more than 0.031."""
_KINDS: dict[tuple[bool, bool], tuple[type, ...]] = {
    (True, False): (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, CacheLayer),
    (False, True): (LinearAttentionLayer,),
    (True, True): (LinearAttentionAndFullAttentionLayer,),
    (False, False): (DummyLayer,),
}
"""The layers of transformers' caches that are read, by whether they attend, and keep a state."""


Grid = Tensor | np.ndarray | Sequence[Sequence[int]] | None
"""A number for each row and slot."""


def from_hf(
    lanes: Lanes,
    past: Cache,
    tokens: Sequence[Tokens],
    attention_mask: Grid = None,
    position_ids: Grid = None,
) -> KVCache:
    """A transformers cache as kvprobe's, with the slots that the attention mask hides left out.

    The tokens are read again, in one pass. Slots that a sliding-window layer has dropped are taken from it, so that
    text can be taken back and gaps can be closed up.

    Args:
        tokens: of its slots, a run for each row; with an attention mask those of all slots, or of the live ones.
        attention_mask: under which they were read, a row of 0 and 1 (live) for each row.
        position_ids: at which they were read; by default at the tokens' own positions, or, under an attention mask,
            counted from each row's first live slot (as `generate` does) or from slot 0 (as `forward` does).

    Raises:
        UserError: the cache is of another kind than `DynamicCache` with full and sliding layers, of another model, or
            not of these tokens, read at these positions with all of these slots in view.
    """
    if not isinstance(getattr(past, "layers", None), list):
        raise UserError(
            f"{type(past).__name__} has no layers of its own; give a DynamicCache of transformers (of an "
            "EncoderDecoderCache its self_attention_cache)."
        )
    if not past.layers:
        raise UserError("The cache has no layer yet; read a text with it first.")
    layers: list[Any] = [*past.layers]  # some kinds of layers, refused below, have no keys
    if len(layers) != lanes.geometry.n_layers:
        raise UserError(
            f"The cache has {len(layers)} layers, but the model has {lanes.geometry.n_layers}; a cache can only be "
            "read by the model that made it."
        )
    for number, (layer, names) in enumerate(zip(layers, lanes.geometry.parts, strict=True)):
        if type(layer) not in _KINDS[attends(names), recurrent(names)]:
            raise UserError(
                f"Layer {number} of the cache is a {type(layer).__name__}, and this layer of the model stores "
                f"{' and '.join(names) or 'nothing'}; generate with DynamicCache(config=model.config)."
            )
        if names and not (layer.is_initialized if attends(names) else layer.has_previous_state[0]):
            raise UserError(f"Layer {number} of the cache is empty; read a text with it first.")
    slots = {number: layers[number] for number, names in enumerate(lanes.geometry.parts) if attends(names)}
    count = int(next(iter(slots.values())).get_seq_length())
    live = _grid("attention_mask", attention_mask, len(tokens), count)
    live = torch.ones(len(tokens), count, dtype=torch.bool) if live is None else live.bool()
    positions = _grid("position_ids", position_ids, len(tokens), count)
    _refuse_other_counts(slots, tokens, live)
    missing = [count - slots[number].keys.shape[2] if number in slots else 0 for number in range(len(layers))]
    _refuse_gaps(lanes, missing, count)
    rows = [row.at(kept) if len(row) == count else row for row, kept in zip(tokens, _places(live), strict=True)]
    # The live slots of each row come first, in order.
    pick = (~live).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(map(len, rows))].to(lanes.device)

    def at_live_slots(tensor: Tensor) -> Tensor:
        """With zeros for the slots that the layer has dropped."""
        whole = torch.nn.functional.pad(tensor.to(lanes.device), (0, 0, count - tensor.shape[2], 0))
        return at_slots(whole, pick)

    held = {number: tuple(map(at_live_slots, held_by(layer))) for number, layer in slots.items()}
    refusals: list[UserError] = []
    for placed in _placings(rows, live, positions):
        again = prefill(lanes, placed)
        writes = [tuple(slots_and_writes(layer)[1].values()) for layer in again.layers]
        whole = [(*held.get(number, ()), *written) for number, written in enumerate(writes)]
        cache = of_held(lanes, whole, new_slots(placed, lanes.device))
        refuse_foreign(lanes, cache)
        cache.refuse_nonfinite()
        try:
            proved = _proved(lanes, cache, again, pick, missing)
            for number in lanes.geometry.recurrent:
                _refuse_other_state(lanes, layers[number], _native(lanes, again, number), number)
            return proved
        except UserError as error:
            refusals.append(error)
    raise refusals[0]


def to_hf(lanes: Lanes, cache: KVCache) -> DynamicCache:
    """A cache as transformers' `DynamicCache`, whose next token stands at the position of its length.

    Raises:
        UserError: the cache is of another model, or has slots that are not live or not at the position of their index.
    """
    refuse_foreign(lanes, cache)
    if not cache.ledger.untouched or bool((cache.ledger.following != cache.slots).any()):
        raise UserError(
            "The cache has slots that are masked, padding, or not at the position of their index, which a cache of "
            "transformers cannot say; evict what is hidden and re-index the rest: cache.evict(…).reindex()."
        )
    seen = as_seen(lanes, cache)
    return past_key_values([_native(lanes, seen, number) for number in range(cache.n_layers)])


def _native(lanes: Lanes, cache: KVCache, number: int) -> Any:
    """A layer of transformers' own kinds; a state is folded of what is written."""
    slots, writes = slots_and_writes(cache.layers[number])
    if not writes:
        return CacheLayer([part.clone() for part in slots.values()]) if slots else DummyLayer()
    live, padding = ~cache.ledger.padding, cache.ledger.padding
    folded: Any = StateLayer(writes, live, padding)
    module: Any = lanes.recurrent_modules[lanes.geometry.recurrent.index(number)]
    native: Any = LinearAttentionAndFullAttentionLayer() if slots else LinearAttentionLayer()
    native.update_conv_state(
        last_inputs(writes["conv"], live, width := module.conv_kernel_size), conv_kernel_size=width
    )
    if "decay" in writes:
        native.update_recurrent_state(folded.recurrent_states[0])
    if slots:
        native.update(*(part.clone() for part in slots.values()))
    return native


def _refuse_other_state(lanes: Lanes, theirs: Any, ours: Any, number: int) -> None:
    """Refuse a layer whose state is not that of the layer that was read again."""
    rules: list[Kept] = [_STATES[name] for name in lanes.geometry.parts[number] if name in _STATES]
    pairs: list[tuple[Kept, Tensor, Tensor]] = [
        (rule, theirs.recurrent_states[0], ours.recurrent_states[0]) for rule in rules
    ]
    own, new = (layer.conv_states[0].transpose(1, 2)[:, None] for layer in (theirs, ours))
    pairs.append(("convolution", own, new))
    for kept, own, new in pairs:
        floor = floor_of_dtype(lanes.dtype, kept)
        most = floor.allowed("state", number / max(1, lanes.geometry.n_layers - 1), new.shape[2])
        if own.shape != new.shape or any(
            bool((vectors_apart(*pair) > most).any()) for pair in zip(own, new, strict=True)
        ):
            raise UserError(
                f"The state of layer {number} is not that of the tokens that were given; give the tokens that the "
                "cache was made from, with padding the attention_mask, and no cache that was edited."
            )


def _grid(name: str, given: object, rows: int, count: int) -> Int[Tensor, "rows count"] | None:
    """A number for each slot, as users give it."""
    if given is None:
        return None
    try:
        grid = torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UserError(
            f"`{name}` holds numbers that are too large, or rows that are not alike ({str(error).rstrip('.')}); give "
            f"whole numbers for {rows} rows of {count} slots, all that the cache has read."
        ) from error
    if tuple(grid.shape) != (rows, count) or grid.is_floating_point():
        raise UserError(
            f"`{name}` has shape {tuple(grid.shape)} in {grid.dtype}; give whole numbers for {rows} rows of {count} "
            "slots, all that the cache has read."
        )
    return grid


def _places(live: Bool[Tensor, "rows count"]) -> list[list[int]]:
    return [[place for place, kept in enumerate(entries(row, bool)) if kept] for row in live]


def _placings(
    rows: Sequence[Tokens], live: Bool[Tensor, "rows count"], positions: Int[Tensor, "rows count"] | None
) -> list[list[Tokens]]:
    """The rows at the positions at which they may have been read."""
    if positions is not None:
        return [[_moved(row, entries(at[kept], int)) for row, at, kept in zip(rows, positions, live, strict=True)]]
    if bool(live.all()):
        return [[*rows]]
    by_slot = [_moved(row, kept) for row, kept in zip(rows, _places(live), strict=True)]
    return [[_moved(row, range(len(row))) for row in rows], by_slot, [*rows]]


def _moved(row: Tokens, positions: Sequence[int]) -> Tokens:
    return replace(row, positions=tuple(positions), end=None)


def _refuse_other_counts(layers: Mapping[int, Any], tokens: Sequence[Tokens], live: Bool[Tensor, "rows count"]) -> None:
    count, kept = live.shape[1], entries(live.sum(1), int)
    if not all(kept) or any(len(row) not in (count, shown) for row, shown in zip(tokens, kept, strict=True)):
        raise UserError(
            f"The cache has read {count} tokens a row, and rows of {', '.join(map(str, map(len, tokens)))} were given; "
            "give the tokens that it read (the last generated one is not among them), and with padding the "
            "attention_mask."
        )
    for number, layer in layers.items():
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


def _proved(
    lanes: Lanes, cache: KVCache, again: KVCache, pick: Int[Tensor, "rows slots"], missing: Sequence[int]
) -> KVCache:
    """The cache, whole, if it is what the model reads now.

    Args:
        again: what it reads.
        pick: the slot of the transformers cache for each of its slots.
        missing: how many of the first of those each layer has dropped.
    """
    held = torch.stack([pick >= lacking for lacking in missing]) & ~cache.ledger.padding
    _refuse_others(lanes, cache, again, held, pick)
    if not any(missing):
        return cache
    layers = (
        {name: torch.where(kept[:, None, :, None], tensor, new[name]) for name, tensor in own.items()}
        for own, new, kept in zip(cache.layers, again.layers, held, strict=True)
    )
    return replace(cache, layers=tuple(layers))


def _refuse_others(
    lanes: Lanes,
    cache: KVCache,
    read: KVCache,
    compared: Bool[Tensor, "layers rows slots"],
    slots: Int[Tensor, "rows slots"],
) -> None:
    """Refuse a cache that differs from what was read again by more than numerics: in float32 as `kvprobe.diff` judges.

    Args:
        compared: which slots of which layers.
        slots: what they are called.
    """
    distances = distances_between(cache.layers, read.layers, lambda layer: compared[layer][:, None])
    floor = floor_of_dtype(lanes.dtype)
    full = lanes.dtype == torch.float32
    places = damage_of(distances, floor, _BLOCK).places if full else _beyond_routers(distances, floor)
    found = ((layer, name, where) for layer, parts in enumerate(places) for name, where in parts.items())
    layer, name, where = next((one for one in found if bool(one[2].any())), (0, "", None))
    if where is None:
        return
    row, _, place = map(int, where.nonzero()[0])
    if layer == 0:
        raise UserError(
            f"{name} of layer 0 at slot {int(slots[row, place])} is not that of the token that was given "
            "for it, at its position; give the tokens that the cache was made from, at their positions, and "
            "with padding the attention_mask."
        )
    raise UserError(
        f"{name} of layer {layer} is not what the model reads with all slots before them in "
        "view; give the attention_mask under which the cache was read, and its position_ids if they were "
        "chosen, and no cache that was edited or made by other weights."
    )


def _beyond_routers(distances: Distances, floor: NoiseFloor) -> list[dict[str, Bool[Tensor, "rows _ slots"]]]:
    """The places of each layer that differ by more than rounding and routers explain."""
    places: list[dict[str, Tensor]] = []
    for number, (parts, compared) in enumerate(zip(distances.parts, distances.compared, strict=True)):
        depth = number / max(1, len(distances.parts) - 1)
        places.append({})
        for name, off in parts.items():
            near = min(NEAR, off.shape[2])
            medians = off.masked_fill(~compared[:, None], torch.nan).unfold(2, near, 1).nanmedian(-1).values
            beyond = medians > max(floor.newborn, floor.most_usual(name, depth))
            places[-1][name] = (off > FAR) | torch.nn.functional.pad(beyond, (0, near - 1))
    return places
