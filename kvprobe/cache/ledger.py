"""The ledger: what is known of every slot of a cache.

Positions, segments, provenance and liveness are carried with the slots. Nothing is inferred from a length, so an
eviction cannot silently move a token (the bug of every home-made eviction script).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.brief import Brief
from kvprobe.cache import shown
from kvprobe.cache.computed import Engine, coarsest
from kvprobe.cache.entries import entries
from kvprobe.checks import names_of
from kvprobe.errors import UserError, warn
from kvprobe.fingerprint import Maker, distinct
from kvprobe.names import unknown
from kvprobe.text.tokens import ANSWER_HEADER, GENERATED

PADDING = -1
"""Segment index of a slot that holds no token."""
OWN = -1
"""Maker of a slot that the model of the cache computed."""
NO_TOKEN = -1
"""Token of a slot that was fitted or trained (see `kvprobe.editing`), not read."""

SINK_HIDDEN = (
    "What is hidden holds slot 0, the attention sink of most models, so a part of any effect is its loss, or in a "
    "restart its move to the next token; leave it in view (`slots=`, or delimiters='kept'), or compare with a restart."
)
COLUMNS = (
    *("tokens", "positions", "origins", "segments", "recomputed", "delimiters", "quantised", "makers", "edited"),
    "dropped",
)
"""Fields with one entry per row and slot."""
_BLANK = {"segments": PADDING, "quantised": -1, "makers": OWN}
"""What padding holds in these fields where it is not 0."""


@dataclass(frozen=True)
class QuantisationFormat:
    """How finely quantised slots are stored.

    Attributes:
        bits: per number.
        group: how many numbers share a scale and a minimum: slots of a key channel, channels of a value.
    """

    bits: int
    group: int


def _place(makers: Sequence[Maker], maker: Maker) -> int:
    """Where a model is among others; `OWN` where it is not."""
    return next((place for place, one in enumerate(makers) if one.same(maker)), OWN)


@dataclass(frozen=True, repr=False)
class Ledger(Brief):
    """One entry per slot, for each row of the batch.

    Attributes:
        tokens: vocabulary id of the token in the slot; `NO_TOKEN` where its numbers were fitted.
        positions: the logical index at which later queries see the slot.
        origins: the position at which the key was computed, and to which its stored form is rotated. It differs from
            `positions` after re-indexing; a reader of the key then rotates it from here, once.
        segments: index into `names`, or `PADDING`.
        recomputed: provenance; true where the slot was computed without text that had been before it.
        delimiters: whether the token belongs to the chat template, not to the text of a message.
        quantised: number of the group that the slot was quantised with, or -1 where it has full precision.
        makers: which model computed the slot: index into `others`, or `OWN` for that of the cache.
        edited: provenance; true where numbers of the slot were changed after it was computed: patched, set to zero,
            steered, struck by a fault.
        dropped: whether layers that slide over a window hold nothing of the slot, which had left their windows when
            the cache was saved.
        live: whether later queries may attend to the slot, per layer and KV head. The layer and head axes are
            1 where all layers or heads agree.
        following: the position after the last token that was read; evicting that token does not change it.
        names: segment names, in order of first appearance.
        quantisation: format of the quantised slots; None where there are none.
        others: models that computed slots and are not that of the cache (see `kvprobe.editing.splice`).
        engine: that computed slots of it, where its caches were measured to differ from those of transformers; of
            several the coarsest.
    """

    tokens: Int[Tensor, "batch slots"]
    positions: Int[Tensor, "batch slots"]
    origins: Int[Tensor, "batch slots"]
    segments: Int[Tensor, "batch slots"]
    recomputed: Bool[Tensor, "batch slots"]
    delimiters: Bool[Tensor, "batch slots"]
    quantised: Int[Tensor, "batch slots"]
    makers: Int[Tensor, "batch slots"]
    edited: Bool[Tensor, "batch slots"]
    dropped: Bool[Tensor, "batch slots"]
    live: Bool[Tensor, "layers batch kv_heads slots"]
    following: Int[Tensor, "batch"]
    names: tuple[str, ...]
    quantisation: QuantisationFormat | None = None
    others: tuple[Maker, ...] = ()
    engine: Engine | None = None

    @staticmethod
    def of(tokens: Int[Tensor, "batch slots"], positions: Int[Tensor, "batch slots"] | None = None) -> "Ledger":
        """The ledger of fresh tokens, all live and in one segment, at these positions (0, 1, … by default)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions.expand_as(tokens)
        nothing = torch.zeros_like(tokens, dtype=torch.bool)
        return Ledger(
            tokens=tokens,
            positions=positions,
            origins=positions,
            segments=torch.zeros_like(tokens),
            recomputed=nothing,
            delimiters=nothing,
            quantised=torch.full_like(tokens, -1),
            makers=torch.full_like(tokens, OWN),
            edited=nothing,
            dropped=nothing,
            live=~nothing[None, :, None, :],
            following=torch.nn.functional.pad(positions, (1, 0), value=-1).amax(1) + 1,
            names=("prompt",),
        )

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    @property
    def uniform(self) -> bool:
        """Whether all layers and heads agree on which slots are live."""
        return self.live.shape[0] == 1 and self.live.shape[2] == 1

    @property
    def padding(self) -> Bool[Tensor, "batch slots"]:
        return self.segments == PADDING

    @property
    def fitted(self) -> Bool[Tensor, "batch slots"]:
        """Provenance: slots without a token, whose numbers were fitted."""
        return (self.tokens == NO_TOKEN) & ~self.padding

    @property
    def of_others(self) -> Bool[Tensor, "batch slots"]:
        """Provenance: slots that another model computed than that of the cache."""
        return (self.makers != OWN) & ~self.padding

    def refuse_mixed(self, what: str) -> None:
        """Refuse slots of several models.

        Args:
            what: what needs slots of one, to begin a sentence with.
        """
        if bool((mixed := self.of_others).any()):
            row, slot = map(int, mixed.nonzero()[0])
            name = self.others[int(self.makers[row, slot])].name
            raise UserError(f"{what} needs slots of one model, and slot {slot} of row {row} is of {name}; evict it.")

    def refuse_fitted(self, what: str, since: int = 0) -> None:
        """Refuse slots without tokens.

        Args:
            what: what needs the tokens, to begin a sentence with.
            since: the first slot of which it needs them.
        """
        if bool((fitted := self.fitted[:, since:]).any()):
            row, slot = map(int, fitted.nonzero()[0])
            raise UserError(
                f"{what} needs tokens, and slot {since + slot} of row {row} was fitted and has none; evict it."
            )

    @property
    def live_somewhere(self) -> Bool[Tensor, "batch slots"]:
        """Slots that are live in some layer and head."""
        return self.live.any(2).any(0)

    def warn_of_sink(self, hidden: Bool[Tensor, "batch slots"]) -> None:
        """Warn where a live slot that was computed at position 0 is to be hidden and others stay."""
        live = self.live_somewhere
        sink = self.origins == 0
        sink[:, :1] |= self.recomputed[:, :1]  # nothing was before it
        if bool((hidden & live & sink).any()) and bool((live & ~hidden).any()):
            warn(SINK_HIDDEN)

    @property
    def last_position(self) -> Int[Tensor, "batch"]:
        """The last position of a live slot in each row; -1 where there is none."""
        return torch.nn.functional.pad(self.positions.masked_fill(~self.live_somewhere, -1), (1, 0), value=-1).amax(1)

    @property
    def rotated(self) -> bool:
        """Whether some live key must be rotated from where it was computed to where it is seen."""
        return bool(((self.positions != self.origins) & self.live_somewhere).any())

    @property
    def untouched(self) -> bool:
        """Whether every slot is live and its position is its index, as in a cache that was not edited."""
        index = torch.arange(self.slots, device=self.positions.device)
        return bool(self.live.all()) and bool((self.positions == index).all())

    @property
    def unfinished(self) -> Bool[Tensor, "batch"]:
        """Whether a row ends in an answer of the model whose end was not read: a header, or generated tokens."""
        answer = self.in_segments([name for name in (ANSWER_HEADER, GENERATED) if name in self.names])
        last = ~self.padding & ((~self.padding).flip(1).cumsum(1).flip(1) == 1)
        return (answer & last).any(1)

    def in_segments(self, names: str | Sequence[str]) -> Bool[Tensor, "batch slots"]:
        """Slots that belong to the named segment or segments; an unknown name is refused."""
        inside = torch.zeros_like(self.segments, dtype=torch.bool)
        for name in names_of(names):
            if name not in self.names:
                raise UserError(unknown("segment", name, self.names))
            inside |= self.segments == self.names.index(name)
        return inside

    def order(self, keep: Bool[Tensor, "batch slots"]) -> tuple[Int[Tensor, "batch kept"], Bool[Tensor, "batch kept"]]:
        """Indices of the slots to keep, in order, and which of them are padding: rows may keep different numbers."""
        keep = keep & ~self.padding
        lengths = keep.sum(1)
        longest = int(lengths.max())
        # A stable sort brings the slots that each row keeps to the front, in order.
        slots = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        return slots, torch.arange(longest, device=keep.device) >= lengths[:, None]

    def take(self, slots: Int[Tensor, "batch kept"], padding: Bool[Tensor, "batch kept"]) -> "Ledger":
        """The ledger of the slots at these indices, row by row; `padding` marks those that hold no token."""
        layers, _, heads, _ = self.live.shape
        index = slots[None, :, None, :].expand(layers, -1, heads, -1)
        columns = ((name, getattr(self, name).gather(1, slots)) for name in COLUMNS)
        taken = {name: column.masked_fill(padding, _BLANK.get(name, 0)) for name, column in columns}
        return replace(self, **taken, live=self.live.gather(3, index) & ~padding[None, :, None, :])

    def rewound(
        self, segment: str | None, slots: int | None, position: int | None
    ) -> tuple[Bool[Tensor, "batch slots"], "Ledger"]:
        """The slots before a place, and the ledger with that place as what follows; see `KVCache.rewind`."""
        if [segment, slots, position].count(None) != 2:
            raise UserError("Say where to go back to: a segment, or `slots`, or `position`, and only one of them.")
        counts, following = (~self.padding).sum(1), self.following
        if segment is not None:
            begins = self.in_segments([segment])
            known = begins.any(1)
        elif slots is not None:
            kept = counts + slots if slots < 0 else torch.full_like(counts, slots)
            begins = (~self.padding).cumsum(1) > kept[:, None]
            known = (kept >= 0) & (kept <= counts)
        else:
            assert position is not None
            begins, following = self.positions >= position, torch.full_like(following, position)
            known = (following >= 0) & (following <= self.following)
        if not bool(known.all()):
            row = int((~known).nonzero()[0])
            place = next(repr(place) for place in (segment, slots, position) if place is not None)
            raise UserError(
                f"Row {row}, with {int(counts[row])} slots and {int(self.following[row])} as its next position, cannot "
                f"go back to {place}; give a segment, a number of slots, or a position that it holds."
            )
        gone = (begins & ~self.padding).cumsum(1) > 0
        left = replace(self, live=self.live & ~gone[None, :, None, :])
        if position is None and self.slots:
            # After re-indexing, slots that are not live share the positions of those before them.
            first = self.positions.gather(1, gone.int().argmax(1, keepdim=True))[:, 0]
            following = torch.where(gone.any(1), torch.maximum(first, left.last_position + 1), following)
        return ~gone, replace(self, following=following)

    def rows(self, index: Int[Tensor, "rows"]) -> "Ledger":
        """The ledger of these rows of the batch."""
        chosen = {name: getattr(self, name)[index] for name in COLUMNS}
        return replace(self, **chosen, live=self.live[:, index], following=self.following[index])

    def closed(self) -> "Ledger":
        """The ledger with its gaps closed: positions count the slots that are live in some layer and head."""
        live = self.live_somewhere.long()
        return replace(self, positions=(live.cumsum(1) - 1).clamp(min=0), following=live.sum(1))

    def append(self, other: "Ledger") -> "Ledger":
        """This ledger followed by another of the same batch, segment names merged."""
        names = self.names + tuple(name for name in other.names if name not in self.names)
        layers = max(self.live.shape[0], other.live.shape[0])
        heads = max(self.live.shape[2], other.live.shape[2])

        def wide(live: Tensor) -> Tensor:
            return live.expand(layers, -1, heads, -1)

        joined = {name: torch.cat([getattr(self, name), getattr(other, name)], 1) for name in COLUMNS}
        joined["segments"] = torch.cat([self.segments, other.numbered(names)], 1)
        others = distinct([*self.others, *other.others])
        joined["makers"] = torch.cat([ledger._made_by(others) for ledger in (self, other)], 1)
        joined["live"] = torch.cat([wide(self.live), wide(other.live)], 3)
        return replace(self.computed_as(other), **joined, following=other.following, names=names, others=others)

    def read_on(self, new: "Ledger") -> "Ledger":
        """This ledger followed by slots that are read after it: where a fitted slot is in view, text that had been
        there is not, so that they count as recomputed."""
        after_fitted = (self.fitted & self.live_somewhere).any(1, keepdim=True) & ~new.padding
        return self.append(replace(new, recomputed=new.recomputed | after_fitted))

    def since(self, slot: int) -> "Ledger":
        """The ledger of this slot and all later ones."""
        columns = {name: getattr(self, name)[:, slot:] for name in COLUMNS}
        return replace(self, **columns, live=self.live[..., slot:])

    def until(self, slot: int) -> "Ledger":
        """The ledger of the slots before this one; what follows them is what follows all."""
        columns = {name: getattr(self, name)[:, :slot] for name in COLUMNS}
        return replace(self, **columns, live=self.live[..., :slot])

    def padded(self, slots: int, *, at_end: bool = True) -> "Ledger":
        """The ledger with padding at its end, or its beginning, so that it has this many slots."""

        def longer(tensor: Tensor, value: int = 0) -> Tensor:
            missing = slots - self.slots
            return torch.nn.functional.pad(tensor, (0, missing) if at_end else (missing, 0), value=value)

        columns = {name: longer(getattr(self, name), _BLANK.get(name, 0)) for name in COLUMNS}
        return replace(self, **columns, live=longer(self.live))

    @staticmethod
    def join(ledgers: "Sequence[Ledger]") -> "Ledger":
        """The rows of several ledgers with equally many slots, segment names merged."""
        names = tuple(dict.fromkeys(name for ledger in ledgers for name in ledger.names))
        formats = {ledger.quantisation for ledger in ledgers if ledger.quantisation is not None}
        if len(formats) > 1:
            raise UserError(
                "Caches of different quantisation formats cannot be joined; quantise them alike, or not at all."
            )
        layers = max(ledger.live.shape[0] for ledger in ledgers)
        heads = max(ledger.live.shape[2] for ledger in ledgers)
        joined = {name: torch.cat([getattr(ledger, name) for ledger in ledgers]) for name in COLUMNS}
        joined["segments"] = torch.cat([ledger.numbered(names) for ledger in ledgers])
        others = distinct([maker for ledger in ledgers for maker in ledger.others])
        joined["makers"] = torch.cat([ledger._made_by(others) for ledger in ledgers])
        return Ledger(
            **joined,
            live=torch.cat([ledger.live.expand(layers, -1, heads, -1) for ledger in ledgers], 1),
            following=torch.cat([ledger.following for ledger in ledgers]),
            names=names,
            quantisation=next(iter(formats), None),
            others=others,
            engine=coarsest(ledger.engine for ledger in ledgers),
        )

    def _facts(self) -> Iterable[str]:
        return shown.facts(self)

    def _html(self) -> str:
        return shown.html(self)

    def numbered(self, names: tuple[str, ...]) -> Int[Tensor, "batch slots"]:
        """Segments as indices into other names, which include all names of this ledger."""
        # One entry more than there are names: the last is where PADDING (-1) lands.
        renumber = torch.tensor([names.index(name) for name in self.names] + [PADDING], device=self.segments.device)
        return renumber[self.segments]

    def within(self, own: Maker | None, other: Maker | None) -> "Ledger":
        """The ledger of a cache of the model `own` as it is in a cache of another; None is of any model."""
        if own is None or other is None or own.same(other):
            return self
        others = distinct([*self.others, own, other])
        makers = torch.where(self.makers == OWN, _place(others, own), self._made_by(others))
        makers = makers.masked_fill((makers == _place(others, other)) | self.padding, OWN)
        return replace(self, makers=makers, others=others).without_unused()

    def computed_as(self, donor: "Ledger") -> "Ledger":
        """The ledger of slots that hold numbers of a donor, too: `engine` is the coarser of the two."""
        return replace(self, engine=coarsest([self.engine, donor.engine]))

    def of_like_origin(self, other: "Ledger") -> Bool[Tensor, "batch slots"]:
        """Slots of one model and, in both or neither, of a token; the other ledger has as many slots."""
        others = distinct([*self.others, *other.others])
        return (self._made_by(others) == other._made_by(others)) & (self.fitted == other.fitted)

    def without_unused(self) -> "Ledger":
        """The same, with those `others` alone that computed a slot."""
        others = tuple(self.others[number] for number in sorted({*entries(self.makers[self.of_others], int)}))
        return replace(self, others=others, makers=self._made_by(others).masked_fill(self.padding, OWN))

    def _made_by(self, others: tuple[Maker, ...]) -> Int[Tensor, "batch slots"]:
        """Makers as indices into other models, among which are all that are used."""
        if others == self.others:
            return self.makers
        # One entry more than there are models: the last is where OWN (-1) lands.
        return torch.tensor([*(_place(others, maker) for maker in self.others), OWN], device=self.makers.device)[
            self.makers
        ]

    def to(self, device: torch.device | str) -> "Ledger":
        moved = {name: getattr(self, name).to(device) for name in (*COLUMNS, "live", "following")}
        return replace(self, **moved)
