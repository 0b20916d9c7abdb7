"""Slots that another model computed, or that were fitted, in one of two caches alone: differences that ledgers know."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.cache.ledger import OWN
from kvprobe.cache.stored import AnyCache
from kvprobe.detection.damaged import Explanation, Kind, slots_in_words
from kvprobe.fingerprint import Maker

AFTER_OTHERS = Explanation(
    "after other slots",
    1.0,
    "They follow slots of another origin, and nothing makes them from the reference's: they were computed with those "
    "in view, or hold another text.",
)
"""Of slots whose origin is the same in both."""
KNOWN: tuple[Kind, ...] = ("another model", "fitted slots")
"""Kinds that need no hypothesis, since the ledgers say so."""


def known_origins(cache: AnyCache, reference: AnyCache, row: int, count: int) -> Iterator[tuple[Tensor, Explanation]]:
    """The slots of a row, of the first so many, whose origin is another in the two caches, and what it is."""
    fitted, expected = (one.ledger.fitted[row, :count].cpu() for one in (cache, reference))
    if bool((fitted != expected).any()):
        which = "the first cache" if bool((fitted & ~expected).any()) else "the second cache"
        yield _known(fitted != expected, "fitted slots", f"were fitted in {which} alone: no model read a token there")
    pairs = torch.stack([one.ledger.makers[row, :count].cpu() for one in (cache, reference)])
    for numbers in pairs.unique(dim=1).T.tolist():
        ours, theirs = (_maker(one, number) for one, number in zip((cache, reference), numbers, strict=True))
        if ours is None or theirs is None or ours.same(theirs):
            continue
        where = (pairs == torch.tensor(numbers)[:, None]).all(0) & ~fitted & ~expected
        if bool(where.any()):
            names = [ours.name, theirs.name]
            if names[0] == names[1]:
                names = [f"{one.name} ({one.fingerprint[:8]})" for one in (ours, theirs)]
            said = f"were computed by {names[0]}, and those of the second cache by {names[1]}"
            yield _known(where, "another model", said)


def _known(where: Bool[Tensor, "slots"], kind: Kind, said: str) -> tuple[Tensor, Explanation]:
    return where, Explanation(kind, 0.0, f"Slots {slots_in_words(where.nonzero()[:, 0])} {said}.")


def _maker(cache: AnyCache, number: int) -> Maker | None:
    return cache.made_by if number == OWN else cache.ledger.others[number]
