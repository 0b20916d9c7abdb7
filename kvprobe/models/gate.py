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

from kvprobe.cache.ledger import PADDING, Ledger
from kvprobe.errors import UserError
from kvprobe.models.gate_caches import (
    Held,
    LongCache,
    empty_cache,
    long_cache,
    read,
    read_after,
    read_few,
    states_apart,
)
from kvprobe.models.hooks import bare
from kvprobe.models.loading import free_bytes
from kvprobe.models.rounding import difference, few_tokens, in_float32
from kvprobe.models.unproved import Lane, UnprovedLanes
from kvprobe.names import one_line

FIRST_REACH, FIRST_ROWS = 256, 8
"""Slots, positions and tokens read at once, and rows, proved before anything is read; more when they are reached."""
_LENGTH, _CUT = 12, 8
_WHOLE = 40
"""Tokens that are read at once without a cache."""
_FEW = 8
"""Slots of a long cache that are not hidden."""
_LAST, _SPREAD = 3, 16
"""Of tokens that are read at once: the last are read again after the others, and so many are compared."""
_ROW_SLOTS = 32
"""Slots of each of many rows."""

_TIES = (
    "; or its index gives several slots the same score, as with few heads, so that the order of the slots decides "
    "which of them it chooses."
)

Check = tuple[bool, str]


@bare()
def prove_plain(lanes: UnprovedLanes) -> bool:
    """Prove on a few tokens that the model is causal, places tokens at the positions given to it, and respects masks.

    Returns:
        Whether masks may differ between its KV heads.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    _prove(lanes, _plain_checks)
    with torch.no_grad():
        by_head = _heads_apart(lanes)
    if not by_head:
        _prove(lanes, lambda lanes: _row_checks(long_cache(lanes, FIRST_REACH)))
    return by_head


@bare()
def prove_reach(lanes: UnprovedLanes, slots: int, position: int) -> None:
    """Prove that a model does among so many slots, and up to so far a position, what it does among a few.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    _prove(lanes, lambda lanes: _length_checks(long_cache(lanes, slots)))
    _prove(lanes, lambda lanes: _far_checks(lanes, read_few(lanes)[1], position))


@bare()
def prove_queries(lanes: UnprovedLanes, queries: int, masked: bool) -> None:
    """Prove that a model reads so many tokens at once, under masks where it does, as it reads a few.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    _prove(lanes, lambda lanes: _query_checks(lanes, read_few(lanes)[1], queries, masked))


@bare()
def prove_rows(lanes: UnprovedLanes, rows: int, by_head: bool) -> None:
    """Prove that a model reads each of so many rows under its own mask, as it does alone.

    Args:
        by_head: whether masks may differ between KV heads, as `prove_plain` returned.

    Raises:
        UserError: a check fails; the sentence says which.
    """
    heads = lanes.geometry.n_kv_heads if by_head else 1
    _prove(lanes, lambda lanes: _row_checks(long_cache(lanes, _ROW_SLOTS), heads, rows=rows))


@bare()
def prove_hooked(lanes: UnprovedLanes, by_head: bool, slots: int) -> None:
    """Prove that the hooked lane computes what the plain lane does, masks, gaps and caches of so many slots included.

    Args:
        by_head: whether masks may differ between KV heads, as `prove_plain` returned.

    Raises:
        UserError: it computes something else, so only the plain lane can be used.
    """
    name = type(lanes.plain).__name__
    cache = long_cache(lanes, slots)
    heads = lanes.geometry.n_kv_heads if by_head else 1
    live, some = _drawn(cache, heads)[:, :1], _some(cache)[None]
    after: list[Callable[..., Tensor]] = [
        partial(cache.read, live=live), partial(cache.read, masked=False), partial(cache.read, at=some)
    ]  # fmt: skip

    def few(lane: Lane) -> list[Tensor]:
        logits, held = read_few(lanes, lane)
        return [logits, *held.tensors]

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


def _prove(lanes: UnprovedLanes, checks: Callable[[UnprovedLanes], Iterator[Check]]) -> None:
    """Raise the sentence of the first check that fails, with its subject.

    In half precision rounding hides mistakes, so that the model is also proved in float32.
    """
    _prove_one(lanes, checks)
    if lanes.dtype.itemsize < 4:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _prove_one(_precise(lanes), checks)


class _Precise(UnprovedLanes):
    """A model that computes in float32, whatever its weights are kept in."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


def _precise(lanes: UnprovedLanes) -> UnprovedLanes:
    try:
        return _Precise(in_float32(lanes.plain))
    except UserError as error:  # a module uses weights of others
        if 4 * sum(parameter.numel() for parameter in lanes.plain.parameters()) < free_bytes(lanes.device) / 2:
            whole: Any = copy.deepcopy(lanes.plain)
            return _Precise(whole.float())
        raise UserError(
            f"{type(lanes.plain).__name__} cannot be proved in {str(lanes.dtype).removeprefix('torch.')}, whose "
            "rounding hides mistakes, and there is no memory for a copy in float32; load it with dtype='float32'."
        ) from error


def _prove_one(lanes: UnprovedLanes, checks: Callable[[UnprovedLanes], Iterator[Check]]) -> None:
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
        raise UserError(f"{name} {refusal.removesuffix('.')}{_TIES if lanes.geometry.indexed else '.'}")


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
        "lets tokens attend to later ones, or reads otherwise in a longer text, so it has no cache that could be "
        "continued; kvprobe reads causal models.",
    )
    whole, held = read_few(lanes)
    yield (
        difference(whole, short) <= lanes.tolerance(),
        "computes other logits at the positions 0, 1, … given to it than by its own count, so it counts from "
        "elsewhere, or reads otherwise with a cache; kvprobe cannot place its tokens.",
    )
    last = lanes.unproved(
        ids, Ledger.of(ids), empty_cache(lanes), logits_to_keep=torch.tensor([_LENGTH - 1], device=ids.device)
    )
    yield (
        last.shape[1] == 1 and difference(last, whole[:, -1:]) <= lanes.tolerance(),
        "does not return the logits of the one token that was asked for.",
    )
    yield (
        (apart := states_apart(lanes)) <= lanes.tolerance(),
        f"keeps a state that is not what its tokens write, by the rule that kvprobe knows (off by {apart:.1e}).",
    )
    yield from _query_checks(lanes, held, FIRST_REACH, masked=True)
    cache = long_cache(lanes, FIRST_REACH, held)
    yield from _row_checks(cache, queries=1)
    yield from _length_checks(cache)
    yield from _far_checks(lanes, held, FIRST_REACH)
    yield from _rows_are_alone(lanes, ids)


def _drawn(cache: LongCache, heads: int, rows: int = FIRST_ROWS) -> Bool[Tensor, "layers rows heads slots"]:
    """Half of the slots of each layer and head, drawn at random, in two rows; the other half in two more; and so on."""
    shape = (cache.lanes.geometry.n_layers, rows // 4, heads, cache.slots)
    half = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(cache.ids.device)
    return torch.stack([half, half, ~half, ~half], 2).flatten(1, 2)


def _leak(cache: LongCache, heads: int, queries: int | None, rows: int = FIRST_ROWS) -> tuple[float, float, float]:
    """How far what hidden slots hold moves the logits, how far the slots that are not hidden do, and how far a row
    lies from what it is alone.

    Each slot of each layer is hidden and visible.
    """
    live = _drawn(cache, heads, rows)
    together = cache.read(queries, live, draws=(1, 2) * (rows // 2))
    alone = cache.read(queries, live[:, -1:], draws=(2,))
    one, again = together[::2], together[1::2]
    return difference(again, one), difference(one[1], one[0]), difference(together[-1:], alone)


def _row_checks(
    cache: LongCache, heads: int = 1, queries: int | None = None, rows: int = FIRST_ROWS
) -> Iterator[Check]:
    """Each row is read under its own mask, as it is alone."""
    leak, effect, apart = _leak(cache, heads, queries, rows)
    yield (
        leak <= cache.lanes.tolerance(effect),
        f"lets what hidden slots hold reach its logits (off by {leak:.1e} among {cache.slots:,} slots in {rows:,} "
        "rows), so masks do not reach every layer.",
    )
    yield apart <= cache.lanes.tolerance(), _beside(apart)


def _beside(apart: float) -> str:
    return (
        f"computes other logits for a row beside others than for the row alone (off by {apart:.1e}); kvprobe "
        "reads many conditions as rows of one batch."
    )


def _query_checks(lanes: UnprovedLanes, held: Held, queries: int, masked: bool) -> Iterator[Check]:
    """Many tokens read at once are read as the last of them are after the others and, under masks, as without them."""
    limit = (lanes.geometry.max_position or torch.inf) - held.ledger.slots
    count = int(max(_LENGTH, min(queries, limit)))
    ids = few_tokens(lanes.plain, count)
    spread = [count * step // _SPREAD for step in range(_SPREAD)]
    kept = torch.tensor(sorted({*spread, *range(count - _LAST, count)}), device=ids.device)
    before, fresh = held.hidden() if masked else None, Ledger.of(ids)
    ledger = fresh if before is None else before.ledger.append(fresh)
    logits, whole = read(lanes, before, ids, ledger, kept=kept)

    def holds(apart: float) -> bool:
        return lanes.only_rounds(apart, torch.inf, lambda: read(lanes, before, ids, ledger, kept=kept)[0])

    if masked:
        apart = difference(logits, lanes.native(ids, kept))
        yield (
            holds(apart),
            f"computes other logits under an explicit mask of who may attend to whom, after hidden slots, than under "
            f"its own (off by {apart:.1e} for {count:,} tokens); kvprobe cannot hide slots from it.",
        )
    apart = difference(read_after(lanes, whole.first(-_LAST), ids[:, -_LAST:]), logits[:, -_LAST:])
    yield (
        holds(apart),
        f"computes other logits with a cache than at once (off by {apart:.1e} after {count:,} tokens); its cache "
        "cannot be edited.",
    )


def _heads_apart(lanes: UnprovedLanes) -> bool:
    """Whether masks that differ between KV heads each reach their own head."""
    if lanes.geometry.recurrent or len({layer[0].heads for layer in lanes.geometry.layers if layer}) > 1:
        return False
    try:
        leak, effect, _ = _leak(long_cache(lanes, FIRST_REACH), lanes.geometry.n_kv_heads, None)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (ValueError, RuntimeError, TypeError):  # a shape that the model does not take
        return False
    return leak <= lanes.tolerance(effect)


def _some(cache: LongCache) -> Int[Tensor, "chosen"]:
    """A few slots from the first to the last, and at the edges of windows."""
    near = (cache.slots - edge + step for edge in cache.lanes.geometry.edges for step in (-1, 0, 1, 2))
    edges = set(near) & set(range(cache.slots))
    spread = {slot * (cache.slots - 1) // _FEW for slot in range(_FEW + 1)}
    return torch.tensor(sorted(edges | spread), device=cache.ids.device)


def _length_checks(cache: LongCache) -> Iterator[Check]:
    """What the model does among many slots is what it does among few, and what its own masks say is what ours do."""
    lanes, slots = cache.lanes, f"{cache.slots:,} slots"
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
    for queries, retained in ((None, some), (1, others), (2, half.to(some.device))):
        live = torch.zeros(1, 1, 1, cache.slots, dtype=torch.bool, device=some.device)
        live[..., retained] = True
        read_alone = partial(cache.read, queries, at=retained[None])
        alone = read_alone()
        apart, effect = difference(cache.read(queries, live), alone), difference(alone, explicit[:, :queries])
        yield (
            lanes.only_rounds(apart, effect, read_alone),
            f"reads otherwise among {slots} of which some are hidden than among the rest alone (off by {apart:.1e}), "
            "so it does something else at this length, or ignores position_ids and counts slots; kvprobe cannot edit "
            "its cache there.",
        )


def _far_checks(lanes: UnprovedLanes, held: Held, position: int) -> Iterator[Check]:
    """Tokens far behind others are read alike at once and after a cache."""
    ids = few_tokens(lanes.plain)
    limit = lanes.geometry.max_position or position
    gap = max(0, min(position, limit) - _LENGTH)
    places = torch.arange(_LENGTH, device=ids.device)[None]
    at_once = lanes.unproved(ids, Ledger.of(ids, places + gap * (places >= _CUT)), empty_cache(lanes), masked=True)
    apart = difference(read_after(lanes, held.first(_CUT), ids[:, _CUT:], gap), at_once[:, _CUT:])
    yield (
        apart <= lanes.tolerance(),
        f"reads tokens at position {gap + _LENGTH - 1:,} otherwise after a cache than at once (off by {apart:.1e}), so "
        "what it caches changes with the positions that follow; its cache cannot be continued there.",
    )


def _rows_are_alone(lanes: UnprovedLanes, ids: Int[Tensor, "1 queries"]) -> Iterator[Check]:
    """A padded short row beside a long one computes what it computes alone."""
    short = _CUT - 3
    rows = torch.cat([ids[:, :_CUT], ids[:, :_CUT].flip(1)])
    padding = torch.zeros_like(rows, dtype=torch.bool)
    padding[1, short:] = True
    places = torch.arange(_CUT, device=ids.device).expand(2, -1).masked_fill(padding, 0)
    ledger = Ledger.of(rows, places)
    ledger = replace(
        ledger,
        segments=ledger.segments.masked_fill(padding, PADDING),
        live=~padding[None, :, None, :],
        following=(~padding).sum(1),
    )
    together = read(lanes, None, rows, ledger)[1]
    alone = read(lanes, None, rows[1:, :short], Ledger.of(rows[1:, :short]))[1]
    rest = ids[:, _CUT:]
    apart = difference(read_after(lanes, together, rest.expand(2, -1))[1:], read_after(lanes, alone, rest))
    yield apart <= lanes.tolerance(), _beside(apart)
