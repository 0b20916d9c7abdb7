"""The gate: it proves on a few tokens that a model does what kvprobe relies on, before any number is taken from it.

A library's model may ignore `position_ids`, count positions by slots, look ahead, or lose a mask on its way to a layer,
without an error, and it may begin to do so only at some length. Each check compares two computations that agree only if
the model does what kvprobe assumes. A failed check refuses the model, the lane, or the length, in one sentence that
says what went wrong.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.cache.ledger import PADDING
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.errors import UserError
from kvprobe.models.attending import Attending
from kvprobe.models.gate_caches import Held, LongCache, empty_cache, fresh_ledger, read, read_after, read_few
from kvprobe.models.hf_cache import CacheLayer, past_key_values
from kvprobe.models.hooks import bare
from kvprobe.models.loading import free_bytes
from kvprobe.models.rounding import difference, few_tokens
from kvprobe.models.unproved import Lane, UnprovedLanes
from kvprobe.names import one_line

FIRST_REACH = 256
"""Slots and positions that are proved before anything is read; more are proved when they are reached."""
_LENGTH, _CUT = 12, 8
_WHOLE = 40
"""Tokens that are read at once without a cache."""
_FEW = 8
"""Slots of a long cache that are not hidden."""

Check = tuple[bool, str]


@bare()
def prove_plain(lanes: UnprovedLanes) -> bool:
    """Prove on a few tokens that the model is causal, places tokens at the positions given to it, and respects masks.

    A model in half precision is also proved as a copy in float32 where memory allows: mistakes that are smaller than
    its rounding do not show.

    Returns:
        Whether masks may differ between its KV heads.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    _prove(lanes, _plain_checks)
    weights = 4 * sum(parameter.numel() for parameter in lanes.plain.parameters())
    if lanes.dtype.itemsize < 4 and weights < free_bytes(lanes.device) / 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            precise: Any = copy.deepcopy(lanes.plain)
            _prove(UnprovedLanes(precise.float()), _plain_checks)
    with torch.no_grad():
        by_head = _heads_apart(lanes)
    if not by_head:
        _prove(lanes, lambda lanes: _leaks(_long_cache(lanes, FIRST_REACH), None))
    return by_head


@bare()
def prove_reach(lanes: UnprovedLanes, slots: int, position: int) -> None:
    """Prove that a model does among so many slots, and up to so far a position, what it does among a few.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    _prove(lanes, lambda lanes: _length_checks(_long_cache(lanes, slots)))
    _prove(lanes, lambda lanes: _far_checks(lanes, read_few(lanes)[1], position))


@bare()
def prove_hooked(lanes: UnprovedLanes, by_head: bool, slots: int) -> None:
    """Prove that the hooked lane computes what the plain lane does, masks, gaps and caches of so many slots included.

    Args:
        by_head: whether masks may differ between KV heads, as `prove_plain` returned.

    Raises:
        UserError: it computes something else, so only the plain lane can be used.
    """
    name = type(lanes.plain).__name__
    cache = _long_cache(lanes, slots)
    heads = lanes.geometry.n_kv_heads if by_head else 1
    live, some = _drawn(cache, heads)[:, :1], _some(cache)[None]
    after: list[Callable[..., Tensor]] = [
        partial(cache.read, live=live), partial(cache.read, masked=False), partial(cache.read, at=some)
    ]  # fmt: skip

    def few(lane: Lane) -> list[Tensor]:
        logits, held = read_few(lanes, lane)
        return [logits, *held.keys, *held.values]

    try:
        with torch.no_grad():
            worst = max(difference(one, other) for one, other in zip(few("hooked"), few("plain"), strict=True))
            holds = worst <= lanes.tolerance(hooked=True)
            for read_long in after if holds else ():
                worst = difference(read_long(lane="hooked"), read_long(lane="plain"))
                if not (holds := lanes.only_rounds(worst, torch.inf, read_long)):
                    break
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(
            f"TransformerLens cannot run {name} with positions and masks of kvprobe's making ({type(error).__name__}: "
            f"{one_line(error)}); use lane='plain', which captures K and V as stored."
        ) from error
    if not holds:
        raise UserError(
            f"TransformerLens computes something else than {name} itself (off by {worst:.1e} of what it should be), "
            "so its hooks cannot be trusted; use lane='plain', which captures K and V as stored, and policies "
            "without scores."
        )


@bare()
def prove_attention(lanes: UnprovedLanes, slots: int) -> None:
    """Prove on a few tokens, alone and after so many slots, that attention is a softmax over scaled scores, with
    softcap and sinks where there are any.

    Only then can attention be recomputed, replaced and patched. Each layer must attend once, with the keys and values
    that its cache holds.

    Raises:
        UserError: it is something else, or the model does not take its attention from transformers' registry.
    """
    ids, layers = few_tokens(lanes.plain), [CacheLayer() for _ in range(lanes.geometry.n_layers)]
    long, observed = _long_cache(lanes, slots), list[tuple[Attending, Tensor]]()
    with torch.no_grad(), lanes.observing_attention_unproved(lambda inputs, output: observed.append((inputs, output))):
        lanes.unproved(ids, fresh_ledger(ids), past_key_values(layers), masked=True)
        few = observed[:]
        long.read()
    name = type(lanes.plain).__name__
    if sorted(inputs.layer for inputs, _ in few) != list(range(len(layers))) or not all(
        _same(inputs.key, layers[inputs.layer].keys) and _same(inputs.value, layers[inputs.layer].values)
        for inputs, _ in few
    ):
        raise UserError(
            f"{name} does not attend once in each layer, by transformers' registry, with the keys and values that its "
            "cache holds, so its attention can be neither shown nor replaced on the plain lane; patch with "
            "KVCache.patch, one cell at a time."
        )
    every = torch.zeros(1, long.slots + long.ids.shape[1], dtype=torch.long, device=ids.device)
    worst = 0.0
    for tokens, queries, pairs in ((ids, ids.shape[1], few), (every, long.ids.shape[1], observed[len(few) :])):
        seen = visible_by_layer(fresh_ledger(tokens), queries, lanes.geometry.windows)
        outputs = ((inputs.output(seen[inputs.layer]).transpose(1, 2), computed) for inputs, computed in pairs)
        worst = max(worst, *(difference(output, computed) for output, computed in outputs))
    # Of one layer, which rounds a few times at most.
    if not worst <= max(1e-4, 8 * torch.finfo(lanes.dtype).eps):
        raise UserError(
            f"{name} attends otherwise than by a softmax over scaled scores (off by "
            f"{worst:.1e}), so its attention can be neither shown nor replaced on the plain lane; patch with "
            f"KVCache.patch, one cell at a time."
        )


def _same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _prove(lanes: UnprovedLanes, checks: Callable[[UnprovedLanes], Iterator[Check]]) -> None:
    """Raise the sentence of the first check that fails, with its subject."""
    name = type(lanes.plain).__name__
    try:
        with torch.no_grad():
            refusal = next((sentence for holds, sentence in checks(lanes) if not holds), None)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model that kvprobe cannot read may fail in any way
        raise UserError(
            f"{name} cannot be read with positions and masks of kvprobe's making ({type(error).__name__}: "
            f"{one_line(error)})."
        ) from error
    if refusal is not None:
        raise UserError(f"{name} {refusal}")


def _plain_checks(lanes: UnprovedLanes) -> Iterator[Check]:
    """Each check in turn: whether it passes, and the sentence about a model that fails, without its subject."""
    ids, long = few_tokens(lanes.plain), few_tokens(lanes.plain, min(_WHOLE, lanes.geometry.max_position or _WHOLE))
    native, short = lanes.native(long), lanes.native(ids)
    yield (
        bool(native.isfinite().all()),
        "computes logits that are not finite on a few tokens; its weights are damaged, or its dtype is too narrow.",
    )
    yield (
        difference(short, native[:, :_LENGTH]) <= lanes.tolerance(),
        "lets tokens attend to later ones, so it has no cache that could be continued; kvprobe reads causal models.",
    )
    whole, held = read_few(lanes)
    yield (
        difference(whole, short) <= lanes.tolerance(),
        "computes other logits at the positions 0, 1, … given to it than by its own count, so it counts from "
        "elsewhere, or reads otherwise with a cache; kvprobe cannot place its tokens.",
    )
    last = lanes.unproved(
        ids, fresh_ledger(ids), empty_cache(lanes), logits_to_keep=torch.tensor([_LENGTH - 1], device=ids.device)
    )
    yield (
        last.shape[1] == 1 and difference(last, whole[:, -1:]) <= lanes.tolerance(),
        "does not return the logits of the one token that was asked for.",
    )
    explicit, before = read(lanes, None, long, fresh_ledger(long), masked=True)
    apart = difference(explicit, native)
    yield (
        apart <= lanes.tolerance(),
        f"computes other logits under an explicit mask of who may attend to whom than under its own (off by "
        f"{apart:.1e}); kvprobe cannot hide slots from it.",
    )
    before, rest = before.first(long.shape[1] - 3), long[:, -3:]
    apart = difference(read_after(lanes, before, rest), native[:, -3:])
    yield (
        apart <= lanes.tolerance(),
        f"computes other logits with a cache than at once (off by {apart:.1e}); its cache cannot be edited.",
    )
    cache = _long_cache(lanes, FIRST_REACH, held)
    yield from _leaks(cache, 1)
    yield from _masking_is_eviction(lanes, ids, held)
    yield from _length_checks(cache)
    yield from _far_checks(lanes, held, FIRST_REACH)
    yield from _rows_are_alone(lanes, ids)


def _long_cache(lanes: UnprovedLanes, slots: int, held: Held | None = None) -> LongCache:
    """A cache with which the model reads so many slots in all, or as many as it has positions for."""
    ids = few_tokens(lanes.plain)[:, -3:]
    slots = min(slots, lanes.geometry.max_position or slots)
    return LongCache(lanes, held or read_few(lanes)[1], slots - ids.shape[1], ids)


def _drawn(cache: LongCache, heads: int) -> Bool[Tensor, "layers 4 heads slots"]:
    """Half of the slots of each layer and head, drawn at random, in two rows; and the other half in two more."""
    shape = (cache.lanes.geometry.n_layers, 1, heads, cache.slots)
    half = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(cache.ids.device)
    return torch.cat([half, half, ~half, ~half], 1)


def _leak(cache: LongCache, heads: int, queries: int | None = None) -> tuple[float, float]:
    """How far what hidden slots hold moves the logits, and how far the slots that are not hidden do.

    Each slot of each layer is hidden once and visible once.
    """
    read: Any = cache.read(queries, _drawn(cache, heads), draws=(1, 2, 1, 2))
    one, again, other, other_again = read.split(1)
    return max(difference(again, one), difference(other_again, other)), difference(other, one)


def _leaks(cache: LongCache, queries: int | None) -> Iterator[Check]:
    leak, effect = _leak(cache, 1, queries)
    yield (
        leak <= cache.lanes.tolerance(effect),
        f"lets what hidden slots hold reach its logits (off by {leak:.1e} among {cache.slots:,} slots), so masks do "
        "not reach every layer.",
    )


def _heads_apart(lanes: UnprovedLanes) -> bool:
    """Whether masks that differ between KV heads each reach their own head."""
    try:
        leak, effect = _leak(_long_cache(lanes, FIRST_REACH), lanes.geometry.n_kv_heads)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (ValueError, RuntimeError, TypeError):  # a shape that the model does not take
        return False
    return leak <= lanes.tolerance(effect)


def _some(cache: LongCache) -> Int[Tensor, "chosen"]:
    """A few slots from the first to the last, and at the edges of windows."""
    windows = {window for window in cache.lanes.geometry.windows if window is not None}
    edges = {cache.slots - window + step for window in windows for step in (-1, 0, 1, 2)} & set(range(cache.slots))
    spread = {slot * (cache.slots - 1) // _FEW for slot in range(_FEW + 1)}
    return torch.tensor(sorted(edges | spread), device=cache.ids.device)


def _length_checks(cache: LongCache) -> Iterator[Check]:
    """What the model does among many slots is what it does among few, and what its own masks say is what ours do."""
    lanes, slots = cache.lanes, f"{cache.slots + cache.ids.shape[1]:,} slots"
    explicit = cache.read()
    for queries in (None, 1):
        apart = difference(cache.read(queries, masked=False), explicit[:, :queries])
        yield (
            lanes.only_rounds(apart, torch.inf, partial(cache.read, queries)),
            f"lets tokens attend to other slots than its config says (off by {apart:.1e} among {slots}): it has a "
            "window or a mask that is not declared, or none where one is; kvprobe cannot edit its cache.",
        )
    half = torch.randperm(cache.slots, generator=torch.Generator().manual_seed(3))[: cache.slots // 2].sort().values
    some: Any = _some(cache)
    others = (some + 1).clamp(max=cache.slots - 2).unique()
    for queries, retained in ((None, some), (1, others), (None, half.to(some.device))):
        live = torch.zeros(1, 1, 1, cache.slots, dtype=torch.bool, device=some.device)
        live[..., retained] = True
        read_alone = partial(cache.read, queries, at=retained[None])
        alone = read_alone()
        apart, effect = difference(cache.read(queries, live), alone), difference(alone, explicit[:, :queries])
        yield (
            lanes.only_rounds(apart, effect, read_alone),
            f"reads otherwise among {slots} of which some are hidden than among the rest alone (off by {apart:.1e}), "
            "so it does something else at this length, or counts slots; kvprobe cannot edit its cache there.",
        )


def _far_checks(lanes: UnprovedLanes, held: Held, position: int) -> Iterator[Check]:
    """Tokens far behind others are read alike at once and after a cache."""
    ids = few_tokens(lanes.plain)
    limit = lanes.geometry.max_position or position
    gap = max(0, min(position, limit) - _LENGTH)
    places = torch.arange(_LENGTH, device=ids.device)[None]
    at_once = lanes.unproved(ids, fresh_ledger(ids, places + gap * (places >= _CUT)), empty_cache(lanes), masked=True)
    apart = difference(read_after(lanes, held.first(_CUT), ids[:, _CUT:], gap), at_once[:, _CUT:])
    yield (
        apart <= lanes.tolerance(),
        f"reads tokens at position {gap + _LENGTH - 1:,} otherwise after a cache than at once (off by {apart:.1e}), so "
        "what it caches changes with the positions that follow; its cache cannot be continued there.",
    )


def _masking_is_eviction(lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"], held: Held) -> Iterator[Check]:
    """Reading after masked slots equals reading after evicted ones."""
    before, rest = held.first(_CUT), ids[:, _CUT:]
    # Evicted slots near the end and a gap before the new tokens make counted slots differ from positions.
    retained = torch.tensor([slot not in (_CUT - 4, _CUT - 3, _CUT - 2) for slot in range(_CUT)], device=ids.device)
    masked = replace(before, ledger=replace(before.ledger, live=retained[None, None, None]))
    evicted = Held(
        before.ledger.take(
            retained.nonzero()[:, 0][None], torch.zeros(1, int(retained.sum()), dtype=torch.bool, device=ids.device)
        ),
        tuple(keys[:, :, retained] for keys in before.keys),
        tuple(values[:, :, retained] for values in before.values),
    )
    # A few positions, but fewer than the shortest window spans.
    gap = min(5, max(1, (lanes.geometry.shortest_window or 16) - 3))
    seen, hidden, gone = (read_after(lanes, cache, rest, gap) for cache in (before, masked, evicted))
    apart, effect = difference(gone, hidden), difference(seen, hidden)
    # A model may ignore positions, if it does not count slots either.
    holds = apart <= lanes.tolerance(effect)
    deaf = not holds and torch.equal(read_after(lanes, before, rest, gap + 1), seen)
    yield (
        holds,
        f"{'ignores position_ids, and ' if deaf else ''}computes other logits after slots were evicted than after they "
        f"were masked at the same positions (off by {apart:.1e}), so it places tokens by slots; kvprobe cannot edit "
        "its cache.",
    )


def _rows_are_alone(lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"]) -> Iterator[Check]:
    """A padded short row beside a long one computes what it computes alone."""
    short = _CUT - 3
    rows = torch.cat([ids[:, :_CUT], ids[:, :_CUT].flip(1)])
    padding = torch.zeros_like(rows, dtype=torch.bool)
    padding[1, short:] = True
    places = torch.arange(_CUT, device=ids.device).expand(2, -1).masked_fill(padding, 0)
    ledger = fresh_ledger(rows, places)
    ledger = replace(
        ledger,
        segments=ledger.segments.masked_fill(padding, PADDING),
        live=~padding[None, :, None, :],
        following=(~padding).sum(1),
    )
    together = read(lanes, None, rows, ledger)[1]
    alone = read(lanes, None, rows[1:, :short], fresh_ledger(rows[1:, :short]))[1]
    rest = ids[:, _CUT:]
    apart = difference(read_after(lanes, together, rest.expand(2, -1))[1:], read_after(lanes, alone, rest))
    yield (
        apart <= lanes.tolerance(),
        f"computes other logits for a row beside a longer one than for the row alone (off by {apart:.1e}); kvprobe "
        f"reads many conditions as rows of one batch.",
    )
