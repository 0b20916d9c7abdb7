"""Prompts that begin alike: what they have in common is read once."""

from collections.abc import Sequence

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens

Unread = tuple[KVCache | None, Tokens]
"""What was read of a prompt, as a cache of one row, if anything was; and what is left of it, one token at least."""


def common_start(rows: Sequence[Tokens]) -> int:
    """How many first tokens all rows have in common: the same ones in the same segments at the same positions."""
    columns = zip(
        *(zip(row.ids, row.positions, row.segments, row.recomputed, row.delimiters, strict=True) for row in rows),
        strict=False,
    )
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(map(len, rows)))


def read_common(
    model: Model, rows: Sequence[Tokens], past: KVCache | None = None
) -> tuple[KVCache | None, list[Tokens]]:
    """The cache of what all rows have in common, read after `past`; and what is left of each, one token at least."""
    common = min(common_start(rows), min(map(len, rows)) - 1)
    cache = model.extend(past, [rows[0][:common]])[0] if common else past
    return cache, [row[common:] for row in rows]


def read_branches(model: Model, rows: Sequence[Tokens], past: KVCache | None = None) -> list[Unread]:
    """Of each row what it has in common with others, read after `past`; and what is left of it.

    Rows part like the branches of a tree, and what several of them share is read once, up to the token before the last
    one of the shortest.
    """
    past, left = read_common(model, rows, past)
    branches: dict[int, list[int]] = {}
    for number, row in enumerate(left):
        branches.setdefault(row.ids[0], []).append(number)
    if len(branches) == 1:
        return [(past, row) for row in left]
    unread: dict[int, Unread] = {}
    for numbers in branches.values():
        members = [left[number] for number in numbers]
        forked = read_branches(model, members, past) if len(members) > 1 else [(past, members[0])]
        unread.update(zip(numbers, forked, strict=True))
    return [unread[number] for number in range(len(rows))]
