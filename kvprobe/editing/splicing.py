"""Putting slots that were computed elsewhere into a cache: positions move, keys are rotated when they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.arguments import FARTHEST, Position, checked_arguments
from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache, combined
from kvprobe.cache.layer import Layer
from kvprobe.errors import UserError
from kvprobe.text.tokens import refuse_reserved

PARTLY_FILLED = (
    "A recurrent layer decays over the gap at this place, which the piece would fill in part; give a piece that fills "
    "it, or close the gap first with reindex()."
)


@checked_arguments
def splice(
    cache: KVCache,
    piece: KVCache,
    *,
    at: Position | None = None,
    recomputed: bool = False,
    other_maker: bool = False,
) -> KVCache:
    """The cache with the slots of a piece put in, the first of them at position `at`.

    Slots of the cache from there on move only as far as the piece needs room, so that one that was evicted fits where
    it stood. Every slot keeps where it was computed (`ledger.origins`). `KVCache.evict` is the inverse where the piece
    filled a gap, and `KVCache.rewind` where it came after everything; elsewhere later slots stay moved.

    Args:
        piece: slots of the same model, such as `cache.select("T1")`; a single row is put into every row.
        at: position; after everything by default.
        recomputed: count the slots of the piece as computed without what stands before them, as they are where it
            was read by itself; otherwise each keeps its provenance.
        other_maker: let the piece be of another model of the same shape, such as a fine-tune. The ledger keeps of
            which (`makers`, `others`), and the cache stays one of its own model, which alone reads it.

    Raises:
        UserError: another model, other rows, quantised slots, positions that no slot can have, or a gap in a recurrent
            layer that the piece would fill in part.
    """
    refuse_other_model(cache, piece, "The piece", any_maker=other_maker)
    piece = replace(piece, ledger=piece.ledger.within(piece.made_by, cache.made_by))
    refuse_quantised(cache, piece)
    if piece.batch != cache.batch:
        if piece.batch != 1:
            raise UserError(f"The piece has {piece.batch} rows, the cache {cache.batch}; give one row, or as many.")
        piece = piece.fork(cache.batch)
    base, added = cache.ledger, piece.ledger
    if not base.slots:
        raise UserError("The cache holds no slots; start from the piece itself, and reindex() it.")
    if bool(added.padding.all(1).any()):
        raise UserError("A row of the piece holds no slots; give a piece that does.")
    start = base.following if at is None else torch.full_like(base.following, at)
    first = added.positions.masked_fill(added.padding, torch.iinfo(torch.long).max).amin(1)
    end = start + added.positions.masked_fill(added.padding, -1).amax(1) + 1 - first
    later = _later(base.positions, base.padding, start)
    after = torch.where(later.any(1), base.positions.gather(1, later.int().argmax(1, True))[:, 0], base.following)
    # Where nothing is after the place, what comes next is, but only if it would otherwise fall into the piece.
    room = (end - after).clamp(min=0)
    new = replace(added, positions=(added.positions - first[:, None] + start[:, None]).clamp(min=0))
    if recomputed:
        new = replace(new, recomputed=~new.padding)
    moved = replace(
        base,
        positions=base.positions + room[:, None] * later,
        following=torch.maximum(base.following + room, end),
    )
    if (reached := int(moved.following.max())) > FARTHEST:
        raise UserError(
            f"The slots would reach position {reached - 1}, too far for a model; give a smaller `at`, or close gaps "
            "with reindex() first."
        )
    new = replace(new, following=moved.following)
    filled = _gap_filled(base.positions, base.padding, later, start, after, end)
    _refuse_lost_time(cache, ~later & ~base.padding, filled, end < after)
    layers = tuple(_time_between(layer, ~later & ~base.padding, filled) for layer in cache.layers)
    ends = ~added.padding
    pieces = tuple(_time_between(layer, ends, torch.ones_like(filled, dtype=torch.long)) for layer in piece.layers)
    joined = follow(replace(cache, layers=layers, ledger=moved), replace(piece, layers=pieces, ledger=new))
    kinds = torch.cat([2 * later.long(), torch.ones_like(added.tokens)], 1).masked_fill(joined.ledger.padding, 3)
    order = kinds.argsort(dim=1, stable=True)
    order = order[:, : int((~joined.ledger.padding).sum(1).max())]
    return joined.take(order, joined.ledger.padding.gather(1, order))


@checked_arguments
def concatenate(caches: Sequence[KVCache] | Mapping[str, KVCache], *, other_maker: bool = False) -> KVCache:
    """The slots of several caches one after another, as services do that join documents read by themselves.

    Slots of all but the first count as recomputed, since they have not seen what stands before them. Their keys are
    rotated to the positions after it. `kvprobe.editing.recompute` reads some of them again.

    Args:
        caches: of one model; by name where each is to be one segment.
        other_maker: see `splice`.

    Raises:
        UserError: there is none, a name that is not free for segments, or see `splice`.
    """
    parts = list(caches.values()) if isinstance(caches, Mapping) else list(caches)
    if not parts:
        raise UserError("There are no caches to concatenate; give at least one.")
    if isinstance(caches, Mapping):
        refuse_reserved(caches)
        parts = [_named(part, name) for name, part in caches.items()]
    whole = parts[0]
    for part in parts[1:]:
        whole = splice(whole, part, recomputed=True, other_maker=other_maker)
    return whole


def follow(cache: KVCache, other: KVCache) -> KVCache:
    """The slots of a cache and then those of another, at the positions of their ledgers."""
    following = torch.maximum(cache.ledger.following, other.ledger.following)
    ledger = replace(cache.ledger.append(other.ledger), following=following)
    return combined((cache, other), lambda pair: torch.cat(pair, 2), ledger)


def refuse_quantised(*caches: KVCache) -> None:
    """Refuse slots that share scales, which cannot be parted."""
    if any(cache.ledger.quantisation is not None for cache in caches):
        raise UserError("Quantised slots share scales and cannot be edited one by one; edit first, then quantise.")


def one_row(cache: KVCache) -> None:
    """Refuse a cache of several rows."""
    if cache.batch != 1:
        raise UserError(f"The cache has {cache.batch} rows; edit each by itself, with KVCache.rows, and join them.")


def _named(cache: KVCache, name: str) -> KVCache:
    segments = torch.zeros_like(cache.ledger.segments).masked_fill(cache.ledger.padding, -1)
    return replace(cache, ledger=replace(cache.ledger, segments=segments, names=(name,)))


def _later(
    positions: Int[Tensor, "batch slots"], padding: Bool[Tensor, "batch slots"], start: Int[Tensor, "batch"]
) -> Bool[Tensor, "batch slots"]:
    """The slots from the first one on that stands at a position or after it."""
    return (((positions >= start[:, None]) & ~padding).cumsum(1) > 0) & ~padding


def _gap_filled(
    positions: Int[Tensor, "batch slots"],
    padding: Bool[Tensor, "batch slots"],
    later: Bool[Tensor, "batch slots"],
    start: Int[Tensor, "batch"],
    after: Int[Tensor, "batch"],
    end: Int[Tensor, "batch"],
) -> Int[Tensor, "batch"]:
    """Whether a piece fills the gap at its place: 0 where there is none to fill, 1 where it does, 2 where in part."""
    before = positions.masked_fill(later | padding, -1).amax(1) + 1 if positions.shape[1] else start * 0
    return torch.where(after <= start, 0, torch.where((before == start) & (end >= after), 1, 2))


def _refuse_lost_time(
    cache: KVCache,
    before: Bool[Tensor, "batch slots"],
    filled: Int[Tensor, "batch"],
    open_after: Bool[Tensor, "batch"],
) -> None:
    """Refuse a gap between a piece and what follows it of which no slot before the piece holds the decay."""
    recurrent = any("decay" in layer for layer in cache.layers)
    if recurrent and bool(((filled == 2) & open_after & ~before.any(1)).any()):
        raise UserError(PARTLY_FILLED)


def _time_between(layer: Layer, before: Bool[Tensor, "batch slots"], filled: Int[Tensor, "batch"]) -> Layer:
    """A layer whose state does not decay after the last slot before a place, where what stood there comes back."""
    if "decay" not in layer or not layer["decay"].shape[2]:
        return layer
    decay = layer["decay"]
    index = torch.arange(decay.shape[2], device=decay.device)
    last = before & (index == index.where(before, torch.full_like(index, -1)).amax(1, keepdim=True))
    passing, passed = decay.chunk(2, -1)
    gap = (passed * last[:, None, :, None]).abs().amax((1, 2, 3)) > 0
    if bool((gap & (filled == 2)).any()):
        raise UserError(PARTLY_FILLED)
    kept = torch.where((last & (filled == 1)[:, None])[:, None, :, None], torch.zeros_like(passed), passed)
    return {**layer, "decay": torch.cat([passing, kept], -1)}
