"""Which slot of one run is which slot of another, where a part of the first was masked, evicted or damaged."""

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.cache.ledger import PADDING, Ledger


def aligned(before: Ledger, after: Ledger) -> Int[Tensor, "slots_after"] | None:
    """The slot before for each slot after, in the first row; None where the second is not of slots of the first.

    A segment that kept all its slots is aligned in order. One that lost some is aligned by the positions at which its
    keys were computed, which eviction and re-indexing keep.
    """
    of_segment, origins = _by_segment(before), before.origins[0].tolist()
    places = torch.zeros(after.slots, dtype=torch.long, device=before.tokens.device)
    for name, slots in _by_segment(after).items():
        candidates = of_segment.get(name, [])
        if len(slots) != len(candidates):
            known = {origins[slot]: slot for slot in candidates}
            candidates = [known.get(origin, -1) for origin in after.origins[0, slots].tolist()]
        places[slots] = torch.tensor(candidates, device=places.device)
    in_order = bool((places >= 0).all()) and bool((places.diff() > 0).all())
    return places if in_order and torch.equal(before.tokens[0, places], after.tokens[0]) else None


def _by_segment(ledger: Ledger) -> dict[str | None, list[int]]:
    slots: dict[str | None, list[int]] = {}
    for slot, number in enumerate(ledger.segments[0].tolist()):
        slots.setdefault(None if number == PADDING else ledger.names[number], []).append(slot)
    return slots
