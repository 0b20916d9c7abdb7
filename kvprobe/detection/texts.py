"""Whether two caches are of the same text, and which of their slots are compared."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.cache.entries import entries
from kvprobe.cache.ledger import NO_TOKEN, Ledger
from kvprobe.errors import UserError

_SHOWN, _MOST = 8, 20_000
_EMPTY = (-1, -1)
"""Token and position of padding."""


@dataclass(frozen=True)
class TextDifference:
    """Where the tokens of two caches differ.

    Attributes:
        kind: the first cache lacks slots or has more, the tokens are others, or slots are hidden or stand elsewhere.
        row: of the batch.
        slot: the first that differs.
        sentence: what differs.
    """

    kind: str
    row: int
    slot: int
    sentence: str


def compared_slots(one: Ledger, other: Ledger) -> tuple[Bool[Tensor, "rows slots"], list[TextDifference]]:
    """Which slots are compared: those of each row from the first on that hold the same tokens; and what differs behind
    them.

    Raises:
        UserError: the caches have different numbers of rows, or padding between other slots.
    """
    if one.batch != other.batch:
        raise UserError(
            f"The caches have {one.batch} and {other.batch} rows; compare as many of each, chosen with KVCache.rows."
        )
    common, lengths, differences = min(one.slots, other.slots), list[int](), list[TextDifference]()
    for row in range(one.batch):
        first, second = _filled(one, row), _filled(other, row)
        if any((_EMPTY in pair) and pair[0] != pair[1] for pair in zip(first, second, strict=False)):
            raise UserError(
                f"Row {row} has padding between other slots in one cache than in the other; take it out of both, with "
                "cache.evict(slots=cache.ledger.padding)."
            )
        length = next(
            (place for place, pair in enumerate(zip(first, second, strict=False)) if not _same(*pair)),
            min(len(first), len(second)),
        )
        if length == len(first) == len(second):
            lengths.append(common)
            continue
        lengths.append(length)
        differences.append(_difference(row, length, first, second))
    inside = torch.arange(max(lengths, default=0)) < torch.tensor(lengths)[:, None]
    return inside.to(one.tokens.device), differences


def other_views(
    one: Ledger, other: Ledger, inside: Bool[Tensor, "rows slots"], ended: Collection[int] = ()
) -> list[TextDifference]:
    """Where later tokens see other slots, or the same ones at other positions, among those that are compared; or will
    themselves stand at other positions.

    Args:
        ended: rows whose texts differ, so that they end elsewhere.
    """
    count = inside.shape[1]
    lives = torch.broadcast_tensors(*(ledger.live[..., :count] for ledger in (one, other)))
    hidden = (lives[0] != lives[1]).any(2).any(0) & inside
    moved = (
        inside
        & (one.positions[:, :count] != other.positions[:, :count])
        & lives[0].any(2).any(0)
        & lives[1].any(2).any(0)
    )
    found: list[TextDifference] = []
    for kind, where in (("hidden slots", hidden), ("other positions", moved)):
        if not bool(where.any()):
            continue
        row, slot = where.nonzero()[0].tolist()
        more = f"{int(where.sum())} slots, the first of them slot {slot}{f' of row {row}' if row else ''},"
        said = {
            "hidden slots": f"{more} are hidden in one cache and live in the other, in some layer and head.",
            "other positions": f"{more} stand at other positions: {int(one.positions[row, slot])} in the first cache, "
            f"{int(other.positions[row, slot])} in the second.",
        }
        found.append(TextDifference(kind, row, slot, said[kind]))
    following = [entries(ledger.following, int) for ledger in (one, other)]
    for row, (ours, theirs) in enumerate(zip(*following, strict=True)):
        if row not in ended and ours != theirs:
            of_row = f" of row {row}" if row else ""
            said_of_next = f"The next token{of_row} stands at position {ours} after the first cache, at {theirs}"
            found.append(TextDifference("other positions", row, count, f"{said_of_next} after the second."))
            break
    return found


def compared(
    one: Ledger, other: Ledger, layer: int, inside: Bool[Tensor, "rows slots"]
) -> Bool[Tensor, "rows heads slots"]:
    """The slots of a layer, of those that are compared, that hold a token and are live in both caches; the head axis is
    1 where all heads agree."""
    masks: list[Tensor] = []
    for ledger in (one, other):
        live = ledger.live[layer if ledger.live.shape[0] > 1 else 0]
        masks.append((live & ~ledger.padding[:, None])[..., : inside.shape[1]])
    return masks[0] & masks[1] & inside[:, None]


def _same(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two slots may be compared; a fitted one stands for any token."""
    return one[1] == other[1] and (one[0] == other[0] or NO_TOKEN in (one[0], other[0]))


def _filled(ledger: Ledger, row: int) -> list[tuple[int, int]]:
    """Token and position of the key of each slot, up to the last that holds a token."""
    held = ~ledger.padding[row]
    count = int(held.nonzero()[-1]) + 1 if bool(held.any()) else 0
    columns = (column[row].where(held, -1)[:count].tolist() for column in (ledger.tokens, ledger.origins))
    return list(zip(*columns, strict=True))


def _difference(
    row: int, slot: int, first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]
) -> TextDifference:
    at = f"row {row}, slot {slot}" if row else f"slot {slot}"
    if slot == min(len(first), len(second)):
        fewer = len(first) < len(second)
        return TextDifference(
            "truncated",
            row,
            slot,
            f"The {'first' if fewer else 'second'} cache ends at {at}; the other has {abs(len(first) - len(second))} "
            "slots more, with the same tokens before.",
        )
    ids, others = ([token for token, _ in some] for some in (first, second))
    if ids[slot] == others[slot]:
        places = first[slot][1], second[slot][1]
        return TextDifference(
            "position shift",
            row,
            slot,
            f"From {at} on the ledgers name other positions for the same tokens: {places[0]} and {places[1]}.",
        )
    matcher = SequenceMatcher(None, ids[slot : slot + _MOST], others[slot : slot + _MOST], autojunk=False)
    blocks = [block for block in matcher.get_matching_blocks() if block.size]
    shared = sum(block.size for block in blocks)
    rest = max(len(ids), len(others)) - slot
    again = (
        f"; slot {slot + blocks[0].a} of the first is slot {slot + blocks[0].b} of the second again" if blocks else ""
    )
    alike = shared >= 0.5 * rest
    return TextDifference(
        "another tokenisation" if alike else "another text",
        row,
        slot,
        f"At {at} the first cache has tokens {ids[slot : slot + _SHOWN]}, the second "
        f"{others[slot : slot + _SHOWN]}{again}; {shared} of {rest} tokens from there on are the same.",
    )
