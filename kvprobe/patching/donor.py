"""The donor's K and V on the base's slots: which slot stands for which, and how far keys are rotated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.cache.alike import lack_others, refuse_other_model
from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer
from kvprobe.cache.visibility import refuse_dropped
from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.patching.grid import Cell

Align = Literal["start", "end"] | None


@runtime_checkable
class Rotating(Protocol):
    """A model that rotates keys to their positions, wherever it runs."""

    def as_seen(self, cache: KVCache, /) -> KVCache: ...


@dataclass(frozen=True)
class Aligned:
    """What a donor has for each slot of a base.

    Attributes:
        base: one row, with keys at the positions at which they are seen.
        donor: likewise, on its own slots.
        cache: the donor's K and V on the base's slots, with keys rotated to the base's positions; the base's own where
            the donor has nothing.
        source: the donor's slot for each of the base's; −1 where it has none.
        reasons: by segment, why some of its slots have none.
    """

    base: KVCache
    donor: KVCache
    cache: KVCache
    source: Int[Tensor, "slots"]
    reasons: Mapping[str, str]

    def fitted(self, cells: Sequence[Cell], align: Align) -> list[Cell]:
        """The cells without the slots that the donor has nothing for.

        Raises:
            UserError: there are such slots and `align` is None; or no cell has any other slot.
        """
        missing = {slot for slot, source in enumerate(self.source.tolist()) if source < 0}
        ledger = self.cache.ledger
        fitted = []
        for cell in cells:
            lost = missing.intersection(cell.slots)
            if not lost:
                fitted.append(cell)
                continue
            name = ledger.names[int(ledger.segments[0, min(lost)])]
            if align is None:
                raise UserError(
                    f"{self.reasons[name]}; say which slots stand for which with align='start' or align='end', or "
                    "leave the segment out of the grid."
                )
            rest = tuple(slot for slot in cell.slots if slot not in lost)
            if rest:
                fitted.append(replace(cell, slots=rest))
        if not fitted:
            raise UserError("The donor has nothing for any slot of the grid; give one that shares its segments.")
        return fitted


@checked_arguments
def aligned(model: Rotating, base: KVCache, donor: KVCache, align: Align = None) -> Aligned:
    """A donor's K and V on the base's slots, segment by segment: the first slot with the first, and so on.

    A key that was seen at another position in the donor is rotated to the position of the base's slot: what is swapped
    is content, not position.

    Args:
        align: how segments of unequal length meet: at their start, at their end, or not at all. So do segments of
            which other tokens are gone in the donor than in the base.

    Raises:
        UserError: caches of several rows, of another model, or keys that cannot be rotated (learned positions).
    """
    if align not in (None, "start", "end"):
        raise UserError(unknown("alignment", str(align), ("start", "end")))
    _refuse_unlike(base, donor)
    source, reasons = _sources(base, donor, align)
    base, donor = model.as_seen(base), model.as_seen(donor)
    have = source >= 0
    moved = donor.take(source.clamp(min=0)[None], ~have[None])
    moved = replace(moved, layers=tuple(map(_with_time_of, moved.layers, base.layers)))
    here, there = base.ledger.positions, moved.ledger.origins
    ledger = replace(base.ledger, origins=torch.where(have[None], there, here))
    whole = replace(model.as_seen(replace(moved, ledger=ledger)), ledger=base.ledger.computed_as(donor.ledger))
    return Aligned(base, donor, base.patch(whole, slots=have[None]), source, reasons)


def _with_time_of(donor: Layer, base: Layer) -> Layer:
    """What the donor's tokens wrote, with the decay where the base's slots were evicted: that is the base's time."""
    if "decay" not in donor:
        return donor
    wrote, passed = donor["decay"].chunk(2, -1)[0], base["decay"].chunk(2, -1)[1]
    return {**donor, "decay": torch.cat([wrote, passed], -1)}


def _refuse_unlike(base: KVCache, donor: KVCache) -> None:
    """Refuse caches between which nothing can be swapped."""
    for name, cache in (("base", base), ("donor", donor)):
        if cache.batch != 1:
            raise UserError(f"The {name} has {cache.batch} rows; patch one at a time, with KVCache.rows([i]).")
        if not bool((cache.ledger.live_somewhere & ~cache.ledger.padding).any()):
            raise UserError(f"The {name} has no live slot, so there is nothing to swap; give another cache.")
        refuse_dropped(f"The {name} of a patch", cache.ledger)
    refuse_other_model(base, donor)


def _sources(base: KVCache, donor: KVCache, align: Align) -> tuple[Int[Tensor, "slots"], dict[str, str]]:
    """The donor's slot for each of the base's, and why there are none for some."""
    source = torch.full_like(base.ledger.tokens[0], -1)
    reasons: dict[str, str] = {}
    for name in base.ledger.names:
        base_slots = _slots(base, name)
        if not len(base_slots):
            continue
        if name not in donor.ledger.names:
            reasons[name] = f"The donor has no segment {name!r}"
            continue
        donor_slots = _slots(donor, name)
        if len(base_slots) != len(donor_slots):
            reasons[name] = (
                f"Segment {name!r} has {len(base_slots)} slots in the base and {len(donor_slots)} in the donor"
            )
        elif lack_others(base.ledger, donor.ledger, base_slots, donor_slots):
            reasons[name] = f"Of segment {name!r} other tokens are gone in the donor than in the base"
        if name in reasons and align is None:
            continue
        count = min(len(base_slots), len(donor_slots))
        if align == "end":
            base_slots, donor_slots = base_slots[len(base_slots) - count :], donor_slots[len(donor_slots) - count :]
        source[base_slots[:count]] = donor_slots[:count]
    return source, reasons


def _slots(cache: KVCache, name: str) -> Int[Tensor, "slots"]:
    return (cache.ledger.in_segments([name])[0] & ~cache.ledger.padding[0]).nonzero()[:, 0]
