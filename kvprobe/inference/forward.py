"""Reading tokens into a cache: the one place where a forward pass is given a ledger."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.cache.layer import Layer, slots_and_writes
from kvprobe.cache.ledger import OWN, PADDING, Ledger
from kvprobe.cache.parts import WRITES, described
from kvprobe.cache.rotary import Rotaries, Rotation
from kvprobe.errors import UserError, warn
from kvprobe.fingerprint import differing
from kvprobe.inference.readable import refuse_unreadable
from kvprobe.models.hf_cache import BothLayer, CacheLayer, layers_of, past_key_values
from kvprobe.models.lanes import Lanes
from kvprobe.models.recurrent import StateLayer
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import Tokens


def extend(
    lanes: Lanes,
    past: KVCache | None,
    tokens: Sequence[Tokens],
    lane: Lane = "plain",
    logits: int = 1,
    chunk: int | None = None,
) -> tuple[KVCache, Float[Tensor, "batch last vocab"]]:
    """Read one run of tokens per row after `past`, at the tokens' own positions.

    Rows of unequal length are padded on the right with slots that are not live. A `past` of one row is shared
    by all rows. Returns the longer cache and the logits after the last `logits` tokens of each row.

    Args:
        chunk: tokens of each row that are read at once, so that a pass takes memory for no more; by default those of
            `lanes.chunk`, or all.
    """
    with lanes.looked_at():
        past = one_row_each(lanes, past, len(tokens))
        layers = taps(lanes, past)
        ledger, scores = forward_pass(lanes, past, tokens, layers, lane, logits, chunk or lanes.chunk)
        return cache_of(lanes, layers, ledger), scores


def prefill(lanes: Lanes, tokens: Sequence[Tokens], lane: Lane = "plain", chunk: int | None = None) -> KVCache:
    """The cache of these tokens alone, one row each."""
    return extend(lanes, None, tokens, lane, chunk=chunk)[0]


def prove_reading(lanes: Lanes, past: KVCache | None, tokens: Sequence[Tokens], lane: Lane = "plain") -> None:
    """Run the gate as far as reading these tokens reaches, before anything is hooked or replaced for it."""
    following = max((row.following for row in tokens), default=0)
    held = (0, 0) if past is None else (past.slots, int(past.ledger.positions.max()) + 1 if past.slots else 0)
    lanes.prove(held[0] + max(map(len, tokens), default=0), max(held[1], following), lane)


Rotations = Mapping[str, Rotation]
"""How the parts of a layer that know their position are rotated to another."""


class TapLayer(CacheLayer):
    """One layer of a Hugging Face cache that starts from a kvprobe cache, without changing it.

    Attributes:
        pick: which of the new slots to copy to `picked`.
        store: whether to store what the layer has after reading; otherwise only the picked slots stay in memory.
        stored: the parts of the layer as computed; queries see those that know the position rotated to it.
    """

    def __init__(
        self,
        past: Layer | None = None,
        rotations: Rotations | None = None,
        pick: Int[Tensor, "batch picked"] | None = None,
        store: bool = True,
    ) -> None:
        past, rotations = past or {}, rotations or {}
        super().__init__([*_turned(past, rotations).values()])
        self.pick, self.store = pick, store
        self.picked: tuple[Tensor, ...] = ()
        self.stored: tuple[Tensor, ...] = ()
        self._unrotated = {number: past[name] for number, name in enumerate(past) if name in rotations}

    @staticmethod
    def of_index(keys: Float[Tensor, "batch 1 slots d_index"]) -> "TapLayer":
        """A layer that holds keys of an index and nothing else, and stores nothing."""
        layer: Any = TapLayer(store=False)
        layer.lazy_initialization_indexer(keys)
        layer.indexer_keys = keys[:, 0]
        return layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        before = (self.keys, self.values, self.is_initialized)
        grown = super().update(key_states, value_states)
        self._tap(0, (key_states, value_states), grown)
        if not self.store:
            self.keys, self.values, self.is_initialized = before
        return grown

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        before = (self.indexer_keys, self.is_indexer_initialized)
        grown = super().update_indexer(indexer_key_states)
        self._tap(2, (indexer_key_states[:, None],), (grown[:, None],))
        if not self.store:
            self.indexer_keys, self.is_indexer_initialized = before
        return grown

    def _tap(self, first: int, new: Sequence[Tensor], grown: Sequence[Tensor]) -> None:
        """Copy what the parts from this number on get, and what they then are."""
        if self.pick is not None:
            self.picked = (*self.picked[:first], *(at_slots(tensor, self.pick) for tensor in new))
        if self.store:
            whole = (
                torch.cat([self._unrotated[number], added], 2) if number in self._unrotated else tensor
                for number, (added, tensor) in enumerate(zip(new, grown, strict=True), first)
            )
            self.stored = (*self.stored[:first], *whole)
            # The parts of an index come later than K and V, so theirs are kept until then.
            here = range(first, len(self.stored))
            self._unrotated = {
                number: self.stored[number] if number in here else tensor for number, tensor in self._unrotated.items()
            }


class StateTap(StateLayer):
    """A recurrent layer of a Hugging Face cache, as `TapLayer` is one that attends."""

    def __init__(
        self,
        past: Layer | None = None,
        live: Bool[Tensor, "batch slots"] | None = None,
        padding: Bool[Tensor, "batch slots"] | None = None,
        pick: Int[Tensor, "batch picked"] | None = None,
        store: bool = True,
    ) -> None:
        super().__init__(past, live, padding)
        self.pick, self.store = pick, store

    @property
    def picked(self) -> tuple[Tensor, ...]:
        return () if self.pick is None else tuple(at_slots(part, self.pick) for part in self.written.values())

    @property
    def stored(self) -> tuple[Tensor, ...] | None:
        return super().stored if self.store else None

    def going_on(self, ledger: Ledger, number: int) -> "StateTap":
        """A layer that starts from all that was written to this one, the layer of this number."""
        writes = [name for name in WRITES if name in self.written]
        live = ledger.live[number if len(ledger.live) > 1 else 0, :, 0]
        return StateTap(dict(zip(writes, self.stored or (), strict=True)), live, ledger.padding)


def taps(
    lanes: Lanes,
    past: KVCache | None,
    pick: Mapping[int, Int[Tensor, "batch picked"]] | None = None,
    store: bool = True,
) -> list[Any]:
    """One cache layer per layer of the model, starting from `past`, each key rotated to its position.

    Args:
        pick: for some layers, which of the new slots to copy.
    """
    pick, parts = pick or {}, lanes.geometry.parts
    if past is None:
        return layers_of(
            parts,
            lambda number: TapLayer(pick=pick.get(number), store=store),
            lambda number: StateTap(pick=pick.get(number), store=store),
        )
    rotations = _rotations(lanes.rotaries_by_part, past) if past.ledger.rotated else [None] * past.n_layers
    held = [*map(slots_and_writes, past.layers)]
    lives, padding = past.ledger.live[:, :, 0], past.ledger.padding
    return layers_of(
        parts,
        lambda number: TapLayer(held[number][0], rotations[number], pick.get(number), store),
        lambda number: StateTap(
            held[number][1], lives[number if len(lives) > 1 else 0], padding, pick.get(number), store
        ),
    )


def _rotations(by_part: Rotaries, past: KVCache) -> list[Rotations]:
    """The rotations of each layer's keys to their positions; those of the same frequencies are one."""
    rotaries = {id(rotary): rotary for layer in by_part for rotary in layer.values() if rotary}
    shared = {
        number: Rotation.between(rotary, past.ledger.origins, past.ledger.positions)
        for number, rotary in rotaries.items()
    }
    return [{name: shared[id(rotary)] for name, rotary in layer.items() if rotary} for layer in by_part]


def _turned(layer: Layer, rotations: Rotations) -> Layer:
    """What a layer stores, rotated to its positions."""
    return {name: rotations[name].of(part) if name in rotations else part for name, part in layer.items()}


def as_seen(lanes: Lanes, cache: KVCache) -> KVCache:
    """The cache with each key rotated to its position; that of another model, whose keys turn otherwise, is refused."""
    refuse_foreign(lanes, cache)
    return rotated(cache, lanes.rotaries_by_part) if cache.ledger.rotated else cache


def rotated(cache: KVCache, rotaries: Rotaries) -> KVCache:
    """The cache with each key rotated to its position by these rotary embeddings of its layers."""
    layers = (_turned(*layer) for layer in zip(cache.layers, _rotations(rotaries, cache), strict=True))
    return replace(cache, layers=tuple(layers), ledger=replace(cache.ledger, origins=cache.ledger.positions))


def cache_of(lanes: Lanes, layers: Sequence[Any], ledger: Ledger) -> KVCache:
    """The kvprobe cache that these layers (see `taps`) hold now."""
    return of_held(lanes, [layer.stored or () for layer in layers], ledger)


def of_held(lanes: Lanes, held: Sequence[tuple[Tensor, ...]], ledger: Ledger) -> KVCache:
    """The cache of what transformers' cache holds in each layer, named as this model's parts."""
    layers = (
        {part.name: tensor for part, tensor in zip(parts, tensors, strict=True)}
        for parts, tensors in zip(lanes.geometry.layers, held, strict=True)
    )
    return KVCache(tuple(layers), ledger, lanes.maker)


def at_slots(
    tensor: Float[Tensor, "batch kv_heads slots d_head"], pick: Int[Tensor, "batch picked"]
) -> Float[Tensor, "batch kv_heads picked d_head"]:
    """The vectors at these slots, row by row."""
    return tensor.gather(2, pick[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


def forward_pass(
    lanes: Lanes,
    past: KVCache | None,
    tokens: Sequence[Tokens],
    layers: list[Any],
    lane: Lane,
    logits: int,
    chunk: int | None = None,
) -> tuple[Ledger, Float[Tensor, "batch last vocab"]]:
    """Run the model over `tokens`, with `layers` as its cache, which grow in place.

    Args:
        chunk: see `extend`; with one, `layers` must store what they read.

    Returns the ledger after it, and the logits after the last `logits` tokens of each row.
    """
    refuse_unreadable(lanes, past, tokens, lane, chunk)
    new = new_slots(tokens, lanes.device)
    warn_of_taken_positions(past, new)
    ledger = new if past is None else past.ledger.read_on(new)
    shortest = min(map(len, tokens))
    if not 1 <= logits <= shortest:
        raise UserError(f"logits is {logits}; the shortest row allows a whole number from 1 to {shortest}.")
    # Rows may end at different queries: compute the logits that any row needs, then pick those of each row.
    lengths = torch.tensor([len(row) for row in tokens], device=lanes.device)
    wanted: Any = lengths[:, None] + torch.arange(-logits, 0, device=lanes.device)  # torch gives `unique` no type
    queries, where = wanted.unique(return_inverse=True)
    with torch.no_grad():
        scores = _in_pieces(lanes, new.tokens, ledger, layers, lane, queries, chunk or new.slots)
    scores = scores[torch.arange(len(tokens), device=scores.device)[:, None], where]
    if bool(scores.sum().isnan()) and bool(scores.isnan().any()):  # a sum is far cheaper to test
        if past is not None:
            past.refuse_nonfinite()
        raise UserError(
            f"The logits are NaN, though the cache before is finite; {lanes.dtype} may be too narrow for this model, "
            "load it in another dtype."
        )
    return ledger, scores


def _in_pieces(
    lanes: Lanes,
    ids: Int[Tensor, "batch queries"],
    ledger: Ledger,
    layers: list[Any],
    lane: Lane,
    kept: Int[Tensor, "kept"],
    chunk: int,
) -> Float[Tensor, "batch kept vocab"]:
    """The logits of some queries, of which `chunk` are read at a time.

    Args:
        ledger: of all slots, those of the queries included.
    """
    held, scores = ledger.slots - ids.shape[1], list[Tensor]()
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk]
        inside = kept[(kept >= start) & (kept < start + chunk)] - start
        now = ledger.until(held + start + piece.shape[1])
        wanted = inside if len(inside) else inside.new_zeros(1)
        given = lanes.forward(piece, now, past_key_values(layers), lane, logits_to_keep=wanted)
        if len(inside):
            scores.append(given)
        for number, layer in enumerate(layers if now.slots < ledger.slots else ()):
            if isinstance(layer, BothLayer):
                layer.of_state = layer.of_state.going_on(now, number)
            elif isinstance(layer, StateTap):
                layers[number] = layer.going_on(now, number)
    return torch.cat(scores, 1) if len(scores) > 1 else scores[0]


def new_slots(tokens: Sequence[Tokens], device: torch.device) -> Ledger:
    """The ledger of runs of tokens to be read, padded on the right to the longest."""
    length = max(len(row) for row in tokens)
    names = tuple(dict.fromkeys(name for row in tokens for name in row.names))
    number = {name: index for index, name in enumerate(names)}

    def column(rows: Iterable[Sequence[int]], padding: int, dtype: torch.dtype) -> Tensor:
        padded = [[*row, *[padding] * (length - len(row))] for row in rows]
        return torch.tensor(padded, dtype=dtype, device=device)

    segments = column(([number[name] for name in row.segments] for row in tokens), PADDING, torch.long)
    live: Bool[Tensor, "batch slots"] = segments != PADDING
    positions = column((row.positions for row in tokens), 0, torch.long)
    return Ledger(
        tokens=column((row.ids for row in tokens), 0, torch.long),
        positions=positions,
        origins=positions,
        segments=segments,
        recomputed=column((row.recomputed for row in tokens), False, torch.bool),
        delimiters=column((row.delimiters for row in tokens), False, torch.bool),
        quantised=torch.full_like(positions, -1),
        makers=torch.full_like(positions, OWN),
        edited=torch.zeros_like(live),
        dropped=torch.zeros_like(live),
        live=live[None, :, None, :],
        following=torch.tensor([row.following for row in tokens], device=device),
        names=names,
    )


def onwards(past: KVCache, tokens: Sequence[Tokens]) -> list[Tokens]:
    """These runs of tokens, one a row, moved to the positions where the rows of a cache go on.

    A single run is read by every row, and a cache of one row is shared by all runs.
    """
    following = entries(past.ledger.following, int)
    rows = max(len(following), len(tokens))
    starts = following * rows if len(following) == 1 else following
    runs = list(tokens) * rows if len(tokens) == 1 else tokens
    return [run.shifted(start) for run, start in zip(runs, starts, strict=True)]


def one_row_each(lanes: Lanes, past: KVCache | None, rows: int) -> KVCache | None:
    """`past` with one row for each of `rows`; a cache that this model cannot read is refused."""
    if past is None:
        return None
    refuse_foreign(lanes, past)
    if past.batch == rows:
        return past
    if past.batch == 1:
        return past.fork(rows)
    raise UserError(
        f"The cache has {past.batch} rows, but there are {rows} runs of tokens to read; give one run per row, or a "
        "cache of one row."
    )


def warn_of_taken_positions(past: KVCache | None, new: Ledger) -> None:
    """Warn of new tokens at positions of live slots, as when positions are counted by the cache's length."""
    if past is None:
        return
    last = past.ledger.last_position
    taken = new.positions[:, 0] <= last
    if bool(taken.any()):
        row = int(taken.int().argmax())
        warn(
            f"The new tokens start at position {int(new.positions[row, 0])}, but the cache holds live slots up to "
            f"{int(last[row])}: the naive position mode. Start them at `following`, or use KVCache.reindex('naive')."
        )


def refuse_foreign(lanes: Lanes, cache: KVCache) -> None:
    """Refuse a cache of another model, dtype or device."""
    if cache.shape != (expected := lanes.geometry.layers):
        raise UserError(
            f"The cache has {cache.n_layers} layers of {described(cache.shape)}, but the model {len(expected)} of "
            f"{described(expected)}; a cache can only be read by the model that made it."
        )
    held = cache.tensors[0]
    if held.device != lanes.device or held.dtype != lanes.dtype:
        raise UserError(
            f"The cache is {held.dtype} on {held.device}, but the model {lanes.dtype} on "
            f"{lanes.device}; load the model in the dtype that made the cache, and move the cache with KVCache.to."
        )
    if cache.made_by is not None and not cache.made_by.same(lanes.maker):
        raise UserError(
            "The cache was made by another model (it differs in "
            f"{differing(cache.made_by.fingerprint, lanes.fingerprint)}); read it with its own, or with any of its "
            "shape after dataclasses.replace(cache, made_by=None)."
        )
