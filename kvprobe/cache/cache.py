"""The KV cache of a model as plain tensors with a ledger.

Every operation returns a new cache and leaves the old one as it was; tensors are shared until an operation has to
write. Keys are stored as they were computed, after q/k-norm and rotary embedding. A key that was given another
position since (`reindex`) is rotated to it when it is read. The names of what layers store are in
`kvprobe.cache.parts`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from kvprobe.arguments import AtLeastOne, Distance, Position, checked_arguments
from kvprobe.cache.alike import refuse_other_model, refuse_other_slots, refuse_other_time, refuse_overlap
from kvprobe.cache.contents import Contents
from kvprobe.cache.device import pick_device
from kvprobe.cache.file import load_cache, save_cache
from kvprobe.cache.indices import indices
from kvprobe.cache.layer import Layer, edited_slots
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import KV, ROTATED, WRITES, recurrent
from kvprobe.cache.recurrence import time_moved, timeless
from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.fingerprint import Maker
from kvprobe.names import unknown

PositionMode = Literal["gapped", "contiguous", "naive"]
"""Positions of slots after others were removed: as before, counted anew, or counted anew without rotating keys."""

PatchedPart = Literal[
    "K", "V", "KV", "latent", "rope", "index", "writes", "key", "value", "decay", "step", "gain", "conv"
]
"""What a patch takes from a donor."""
Slots = Bool[Tensor, "batch slots"] | Int[Tensor, "chosen"] | Sequence[int]
"""Some slots of a cache: a boolean per row and slot, or indices that hold for all rows."""


@runtime_checkable
class Damages(Protocol):
    """A fault, as far as a cache knows: see `kvprobe.faults`."""

    def corrupt(self, cache: "KVCache", draws: Any, contexts: Any) -> "KVCache": ...


Fault = Annotated[Damages, "one of kvprobe.faults, such as Zeros()"]


@checked_arguments
@dataclass(frozen=True, repr=False)
class KVCache(Contents):
    """What each layer stores of each slot, and the ledger of the slots.

    Attributes:
        layers: for each layer its parts by name: K and V, after any norm and rotary embedding; with latent attention,
            latent and rope, and with a sparse index its key; in recurrent layers what each token wrote, of which the
            state is computed when it is read. K, rope and index are rotated to `ledger.origins`.
        ledger: tokens, positions, segments, provenance and liveness of the slots.
        made_by: the model that computed it, and that alone may read it; where it is None, any model of its shape may.
    """

    @staticmethod
    def of(
        keys: Sequence[Float[Tensor, "batch _ slots _"]],
        values: Sequence[Float[Tensor, "batch _ slots _"]],
        ledger: Ledger,
        made_by: Maker | None = None,
    ) -> "KVCache":
        """The cache of these keys and values, one tensor of each per layer.

        Raises:
            UserError: there are not as many of one as of the other, or their shapes do not fit.
        """
        if len(keys) != len(values):
            raise UserError(f"A cache needs as many key as value tensors; got {len(keys)} and {len(values)}.")
        return KVCache(tuple({"K": k, "V": v} for k, v in zip(keys, values, strict=True)), ledger, made_by)

    def with_parts(self, parts: Mapping[str, Sequence[Tensor]]) -> "KVCache":
        """The cache with these parts of all layers in place of its own, such as `{"K": keys, "V": values}`.

        Raises:
            UserError: a layer stores other parts, or the new ones do not fit.
        """
        for name, tensors in parts.items():
            if len(tensors) != len(self.part(name)):
                raise UserError(f"The cache has {self.n_layers} layers, and {name} was given for {len(tensors)}.")
        layers = (
            {**layer, **{name: tensors[number] for name, tensors in parts.items()}}
            for number, layer in enumerate(self.layers)
        )
        return self.holding(layers)

    def holding(self, layers: Iterable[Layer]) -> "KVCache":
        """The cache with these layers in place of its own; slots of which numbers change count as edited."""
        new = replace(self, layers=tuple(layers))
        edited = edited_slots(self.ledger.edited, self.layers, new.layers)
        return replace(new, ledger=replace(self.ledger, edited=edited & ~self.ledger.padding))

    def mask(
        self,
        *segments: str,
        slots: Slots | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> "KVCache":
        """Make slots invisible to later queries; nothing moves and no position changes. Warns of slot 0, the sink.

        A layer whose K and V others read too (`repr(model)` says which) is masked in all of these.

        Args:
            segments: names of segments to mask.
            slots: or the slots to mask: a boolean per row and slot, or a list of indices for all rows.
            layers: only in these layers (all by default).
            heads: only in these KV heads (all by default).

        Raises:
            UserError: there is no such segment, slot, layer or KV head.
        """
        hidden = self._hidden(segments, slots)[None, :, None, :]
        if layers is not None or heads is not None:
            hidden = hidden & self._within(layers, heads)
        return replace(self, ledger=replace(self.ledger, live=self.ledger.live & ~hidden))

    def evict(self, *segments: str, slots: Slots | None = None) -> "KVCache":
        """Remove slots and free their memory; the others keep their positions, and so does what comes next (see
        `rewind`). Rows that lose different numbers of slots are padded on the right with slots that are not live.
        """
        return self.take(*self.ledger.order(~self._hidden(segments, slots)))

    def select(self, *segments: str, slots: Slots | None = None) -> "KVCache":
        """Keep only these slots; the opposite of `evict`."""
        chosen = self.chosen(segments, slots)
        self.ledger.warn_of_sink(~chosen)
        return self.take(*self.ledger.order(chosen))

    def rewind(
        self, segment: str | None = None, *, slots: Distance | None = None, position: Position | None = None
    ) -> "KVCache":
        """Take back what was read from some place on: its slots leave, and the next token stands where they began.

        What was done to the slots before that place stays done: those that were masked, evicted or rounded since do
        not come back.

        Args:
            segment: back to before this segment.
            slots: or to so many slots of each row; a negative number takes so many back.
            position: or to before this position, at which the next token then stands.

        Raises:
            UserError: not one of the three is given, or a row has no such segment, slots or position.
        """
        keep, ledger = self.ledger.rewound(segment, slots, position)
        return self._timeless(~keep, ledger).take(*ledger.order(keep))

    def append(self, other: "KVCache") -> "KVCache":
        """The cache followed by the slots of another, which was read by itself at later positions, row by row.

        Its slots have not seen those before them, so they count as recomputed.

        Raises:
            UserError: the other is of another model or number of rows, quantised, or at positions that are taken.
        """
        refuse_overlap(self, other)
        ledger = self.ledger.append(replace(other.ledger, recomputed=~other.ledger.padding))
        return combined((self, other), lambda pair: torch.cat(pair, 2), ledger)

    def reindex(self, mode: PositionMode = "contiguous") -> "KVCache":
        """Give the slots that are live other positions, and what comes next the one after them.

        `contiguous` counts them from 0 and rotates each key, once, from where it was computed. `naive` counts them but
        leaves the keys as they are, so that the model reads them at distances that they were not computed for: the
        classic bug of home-made eviction (llama.cpp #3825). `gapped` changes nothing.

        Values and deeper layers still depend on the old positions: that is provenance, not position. The states of
        recurrent layers no longer decay where slots were hidden or evicted (`contiguous`), or still do.

        Raises:
            UserError: there is no such position mode.
        """
        if mode == "gapped":
            return self
        ledger = self.ledger.closed()
        if mode == "naive":
            # A rotation that an earlier `contiguous` still owes stays owed.
            ledger = replace(ledger, origins=ledger.positions + self.ledger.origins - self.ledger.positions)
            return replace(self, ledger=ledger)
        return self._timeless(~self.ledger.live_somewhere, ledger, gaps=True)

    def fork(self, rows: AtLeastOne = 1) -> "KVCache":
        """A cache with `rows` copies of each row; the copies of a single row share its storage."""
        index = torch.arange(self.batch, device=self.ledger.tokens.device).repeat_interleave(rows)
        return self._each(
            lambda tensor: tensor.expand(rows, -1, -1, -1) if self.batch == 1 else tensor[index],
            self.ledger.rows(index),
        )

    def rows(self, index: Sequence[int] | Int[Tensor, "rows"]) -> "KVCache":
        """The cache of these rows of the batch, in this order; a row may come several times.

        Raises:
            UserError: there is no such row.
        """
        rows = torch.tensor(indices("row", index, self.batch), dtype=torch.long, device=self.ledger.tokens.device)
        return self._each(lambda tensor: tensor[rows], self.ledger.rows(rows))

    @staticmethod
    def join(caches: "Sequence[KVCache]") -> "KVCache":
        """The rows of several caches of one model as one batch; shorter ones are padded with slots that are not live.

        Raises:
            UserError: there is no cache, or they are of several shapes, models or quantisation formats.
        """
        if not caches:
            raise UserError("There are no caches to join; give at least one.")
        slots = max(cache.slots for cache in caches)
        base = next((cache for cache in caches if cache.made_by is not None), caches[0])
        for number, cache in enumerate(caches):
            refuse_other_model(base, cache, f"Cache {number} of those to be joined")

        def joined(tensors: tuple[Tensor, ...]) -> Tensor:
            return torch.cat([functional.pad(tensor, (0, 0, 0, slots - tensor.shape[2])) for tensor in tensors])

        return combined(caches, joined, Ledger.join([cache.ledger.padded(slots) for cache in caches]))

    def corrupt(
        self,
        fault: Fault,
        *,
        draws: Sequence[Any] | None = None,
        contexts: Sequence[Any] | None = None,
    ) -> "KVCache":
        """The cache with a fault written into it, here and now, whenever the fault would strike by itself.

        Args:
            draws: a `kvprobe.faults.draws.Draws` per row, the source of its random draws. By default seed 0, with the
                row's number as its sample.
            contexts: a `kvprobe.faults.context.FaultContext` per row, what the fault may know of it (donors, rotary
                frequencies, queries). By default only the row's own clean cache.

        Raises:
            UserError: it is no fault, or needs more than its context has; or see `Scope`.
        """
        return fault.corrupt(self, draws, contexts)

    def patch(
        self,
        donor: "KVCache",
        *segments: str,
        slots: Slots | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        part: PatchedPart | None = None,
    ) -> "KVCache":
        """The cache with what these slots hold taken from a donor with the same slots; of the ledger nothing changes
        but `edited`, and `engine` where the donor's rounds more.

        A layer whose K and V others read too (`repr(model)` says which) is patched for all of these.

        Keys are copied as they are stored: see `kvprobe.patching.aligned` for donors of other lengths or positions.

        Args:
            segments, slots, layers, heads: which to patch, as for `mask`.
            part: K, V or both; with latent attention latent or rope, and with a sparse index its key; in recurrent
                layers all that was written (writes), or key, value, decay, step, gain or conv. It means the layers
                that store it. All by default.

        Raises:
            UserError: the donor is of another model, slots or positions of keys (see
                `kvprobe.cache.alike.refuse_other_slots`), decays of states of which gaps were closed in one of the two
                alone, or there is no such segment, layer, head or part.
        """
        chosen = self.chosen(segments, slots)
        wanted = {"KV": KV, "writes": WRITES}.get(part or "", (part,))
        taken = [{name for name in layer if part is None or name in wanted} for layer in self.layers]
        if not any(taken):
            raise UserError(unknown("part", str(part), [*{name: None for layer in self.layers for name in layer}]))
        moves = any(name in ROTATED for names in taken for name in names)
        refuse_other_slots(self, donor, chosen, segments, keys=moves)
        if any("decay" in names for names in taken):
            refuse_other_time(self, donor, chosen)
        where = (chosen[None, :, None, :] & self._within(layers, heads))[..., None]
        patched = (
            {
                name: torch.where(place, other[name], tensor) if name in names and bool(place.any()) else tensor
                for name, tensor in own.items()
            }
            for own, other, names, place in zip(self.layers, donor.layers, taken, where, strict=True)
        )
        new = self.holding(patched)
        return replace(new, ledger=new.ledger.computed_as(donor.ledger))

    def to(self, device: torch.device | str) -> "KVCache":
        """The same cache on another device."""
        place = pick_device(device)
        return self._each(lambda tensor: tensor.to(place), self.ledger.to(place))

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file, bit for bit, with a digest of it and the fingerprint of its model.

        Raises:
            UserError: there is no such folder; or the model is no longer in memory or has other weights now, and its
                fingerprint was not computed before.
        """
        save_cache(expanded(path), self.layers, self.ledger, self.made_by)

    @staticmethod
    def load(path: str | Path, *, any_model: bool = False) -> "KVCache":
        """Read a cache written by `save`.

        Args:
            any_model: let any model of its shape read the cache, not only the model that made it.

        Raises:
            UserError: the file is truncated, altered, foreign, inconsistent, or holds a NaN.
        """
        layers, ledger, made_by = load_cache(expanded(path))
        cache = KVCache(layers, ledger, None if any_model else made_by)
        try:
            cache.refuse_nonfinite()
        except UserError as error:
            raise UserError(f"In {path}, {error}") from error
        return cache

    def chosen(self, segments: Sequence[str], slots: Slots | None) -> Bool[Tensor, "batch slots"]:
        """The slots of these segments, or these slots, as a boolean per row and slot.

        Raises:
            UserError: both or neither are given, or there is no such segment or slot.
        """
        if bool(segments) == (slots is not None):
            raise UserError("Name one or more segments, or give `slots`, but not both.")
        if slots is None:
            return self.ledger.in_segments(segments)
        if not isinstance(slots, Tensor) or slots.dtype != torch.bool:
            chosen = torch.zeros_like(self.ledger.tokens, dtype=torch.bool)
            chosen[:, indices("slot", slots, self.slots)] = True
            return chosen
        if slots.shape != self.ledger.tokens.shape:
            raise UserError(
                f"`slots` has shape {tuple(slots.shape)}, but the cache has {self.batch} rows of {self.slots} slots; "
                f"give a boolean for each, or a list of slot indices for all rows."
            )
        return slots.to(self.ledger.tokens.device)

    def _within(self, layers: Sequence[int] | None, heads: Sequence[int] | None) -> Bool[Tensor, "layers 1 heads 1"]:
        """Where these layers and KV heads are; all by default."""
        count = 1 if heads is None else self.n_kv_heads
        where = torch.zeros(self.n_layers, count, dtype=torch.bool, device=self.ledger.tokens.device)
        for layer in indices("layer", layers, self.n_layers):
            where[layer, indices("KV head", heads, count)] = True
        return where[:, None, :, None]

    def _hidden(self, segments: Sequence[str], slots: Slots | None) -> Bool[Tensor, "batch slots"]:
        chosen = self.chosen(segments, slots)
        self.ledger.warn_of_sink(chosen)
        return chosen

    def take(self, slots: Int[Tensor, "batch kept"], padding: Bool[Tensor, "batch kept"]) -> "KVCache":
        """The cache of the slots at these indices, row by row and in this order; `padding` marks empty ones, which
        hold zeros."""
        same_in_all_rows = self.batch == 1 or bool((slots == slots[:1]).all())
        padded, empty = bool(padding.any()), padding[:, None, :, None]

        def taken(tensor: Tensor) -> Tensor:
            if same_in_all_rows:
                chosen = tensor.index_select(2, slots[0])
            else:
                index = slots[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
                chosen = tensor.gather(2, index)
            return chosen.masked_fill(empty, 0) if padded else chosen

        held = ~self.ledger.padding
        layers = (time_moved(layer, slots, padding, held) if recurrent(layer) else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))._each(taken, self.ledger.take(slots, padding))

    def _timeless(self, slots: Bool[Tensor, "batch slots"], ledger: Ledger, gaps: bool = False) -> "KVCache":
        """The cache with this ledger, and states that do not decay in these slots; see `timeless`."""
        layers = tuple(timeless(layer, slots, gaps) if recurrent(layer) else layer for layer in self.layers)
        return replace(self, layers=layers, ledger=ledger)

    def _each(self, edit: Callable[[Tensor], Tensor], ledger: Ledger) -> "KVCache":
        """The cache with every tensor edited, and this ledger."""
        edited = ({name: edit(tensor) for name, tensor in layer.items()} for layer in self.layers)
        return replace(self, layers=tuple(edited), ledger=ledger)


def combined(caches: Sequence[KVCache], combine: Callable[[tuple[Tensor, ...]], Tensor], ledger: Ledger) -> KVCache:
    """One cache of several of one model, each of its tensors combined from theirs."""
    layers = (
        {name: combine(tuple(layer[name] for layer in those)) for name in those[0]}
        for those in zip(*(cache.layers for cache in caches), strict=True)
    )
    return KVCache(tuple(layers), ledger, caches[0].made_by if all(cache.made_by for cache in caches) else None)
