"""What a model can read, checked before memory is taken."""

from collections.abc import Sequence

import torch

from kvprobe.arguments import FARTHEST
from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import NO_TOKEN
from kvprobe.cache.visibility import refuse_dropped_within
from kvprobe.errors import UserError
from kvprobe.models.geometry import embedded_tokens
from kvprobe.models.lanes import Lanes
from kvprobe.models.loading import free_bytes
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import Tokens

NOTICED = 2**28
"""Bytes below which free memory is not checked, since the check takes time."""


def refuse_unreadable(
    lanes: Lanes, past: KVCache | None, tokens: Sequence[Tokens], lane: Lane, chunk: int | None = None
) -> None:
    """Refuse tokens that the model has no embedding for, that need what a cache lacks, or that do not fit into memory.

    Raises:
        UserError: nothing to read, an id or position that the model does not have, or a window in which slots are that
            the cache dropped; or the cache, one layer's activations, masks if the cache was edited, and on the hooked
            lane one layer's attention scores need more memory than is free.
    """
    readable_runs(lanes, tokens)
    shape, rows, queries = lanes.geometry, len(tokens), max(map(len, tokens))
    if past is not None:
        first = torch.tensor([min(row.positions) for row in tokens], device=lanes.device)
        refuse_dropped_within("Going on", past.ledger, first, shape.reaches)
    slots = queries + (0 if past is None else past.slots)
    queries = min(queries, chunk or queries)
    numbers = rows * slots * shape.numbers + rows * queries * 4 * shape.d_model
    if lane == "hooked":
        numbers += rows * shape.n_heads * queries * slots
    in_order = all(row.positions[-1] - row.positions[0] == len(row) - 1 for row in tokens)
    if not in_order or (past is not None and not past.ledger.untouched):
        numbers += rows * queries * slots  # a mask
    needed = numbers * lanes.dtype.itemsize
    if needed > NOTICED and needed > (free := free_bytes(lanes.device)):
        raise UserError(
            f"Reading {rows} rows of up to {max(map(len, tokens)):,} tokens on the {lane} lane needs at least "
            f"{needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on {lanes.device}; read fewer rows at "
            "once, or a prompt with chunk=512, or under a policy that evicts."
        )


def readable_runs(lanes: Lanes, tokens: Sequence[Tokens], name: str | None = None) -> list[Tokens]:
    """These runs of tokens, of which the model can read each.

    Args:
        name: of the argument that gave them.

    Raises:
        UserError: nothing to read, or an id or position that the model does not have.
    """
    within = "" if name is None else f" in `{name}`"
    if not tokens or not all(map(len, tokens)):
        raise UserError(f"There is nothing to read{within}: give at least one token for each row.")
    entries = embedded_tokens(lanes.plain)
    for number, row in enumerate(tokens):
        if min(row.ids) == NO_TOKEN:
            raise UserError(
                f"Row {number} is to read a slot again that was fitted and has no token; evict it, or leave it."
            )
        for extreme in (min(row.ids), max(row.ids)):
            if not 0 <= extreme < entries:
                raise UserError(f"Row {number} has the token id {extreme}; this model has ids 0 to {entries - 1}.")
        for extreme in (min(row.positions), max(row.positions), row.following - 1):
            if not 0 <= extreme <= FARTHEST:
                raise UserError(f"Row {number} has the position {extreme}; positions start at 0 and stay below 2³¹.")
    return [*tokens]


def only_run(runs: Sequence[Tokens], name: str = "text") -> Tokens:
    """The run of an argument that gives one.

    Raises:
        UserError: it gives several.
    """
    if len(runs) != 1:
        raise UserError(f"`{name}` gives {len(runs)} rows, but one is read here; give one text.")
    return runs[0]


def require_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value of another type.

    Args:
        expected: what to give instead, in words.
    """
    if not isinstance(value, kind):
        raise UserError(f"{name} is a {type(value).__name__} ({str(value)[:40]!r}); give {expected}.")
