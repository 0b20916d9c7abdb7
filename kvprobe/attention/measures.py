"""What masking and damage do to attention: where attention on hidden slots goes, and how much damaged slots draw."""

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.attention.alignment import aligned
from kvprobe.attention.patterns import Patterns, named_by_head, refuse_missing
from kvprobe.cache.alike import refuse_other_model
from kvprobe.checks import names_of
from kvprobe.errors import UserError
from kvprobe.tidy import crossed

LOCAL = 32
"""Slots that count as local: the query's own and those right before it."""


@checked_arguments
def dangling(
    before: Patterns,
    after: Patterns,
    hide: str | Sequence[str],
    *,
    summary: str | Sequence[str] = (),
    sinks: int = 1,
    local: int = LOCAL,
) -> pd.DataFrame:
    """The attention that each head spent on slots that are gone, and where that attention went.

    One row per layer and head, means over the queries. `dangling` is the mass before, on slots of `hidden` that this
    head cannot see after. `sink`, `summary`, `local` and `elsewhere` are mass after minus mass before, and add up to
    `dangling`; a slot counts in the first of these groups that it belongs to.

    Args:
        before: the queries with everything in view.
        after: the same queries with the hidden segments masked or evicted.
        hide: the segments that were masked or evicted, or the only one.
        summary: segments that stand in for them.
        sinks: how many of the first live slots are the sink.
        local: how many slots are local, from the query's own backwards.

    Raises:
        UserError: the two are not of the same tokens, layers and queries, or there is no such segment.
    """
    ledger, places = before.cache.ledger, _places(before, after, hide)
    layers, heads = before.weights.shape[:2]
    first_live = after.cache.ledger.live_somewhere[0].nonzero()[:sinks, 0]
    # Weights and liveness after, on the slots before.
    weights = torch.zeros_like(before.weights)
    weights[..., places] = after.weights
    live = torch.zeros(layers, heads, ledger.slots, dtype=torch.bool, device=weights.device)
    live[..., places] = after.live
    gone = (ledger.in_segments(hide)[0] & ~live)[:, :, None]
    index = torch.arange(ledger.slots, device=weights.device)
    distance = before.queries[:, None] - index
    groups = {
        "sink": torch.isin(index, places[first_live]).expand_as(distance),
        "summary": ledger.in_segments(summary)[0].expand_as(distance),
        "local": (distance >= 0) & (distance < local),
        "elsewhere": torch.ones_like(distance, dtype=torch.bool),
    }
    table = {"dangling": (before.weights * gone).sum(-1).mean(-1)}
    remaining = ~gone
    for name, group in groups.items():
        table[name] = ((weights - before.weights) * (remaining & group)).sum(-1).mean(-1)
        remaining = remaining & ~group
    return _table(before, table)


@checked_arguments
def shared_out(before: Patterns, after: Patterns, hide: str | Sequence[str]) -> Patterns:
    """What the queries would attend to after if no score changed: the softmax alone shares the attention that was on
    slots that are gone out over the others, in proportion to what these had before. It is meant for models without
    attention sinks of their own.

    Args:
        before, after, hide: as for `dangling`.

    Raises:
        UserError: as `dangling`.
    """
    places = _places(before, after, hide)
    left = before.weights[..., places].masked_fill(~after.live[:, :, None], 0)
    return replace(after, weights=left / left.sum(-1, keepdim=True))


@checked_arguments
def lift(
    damaged: Patterns, clean: Patterns, slots: Sequence[int] | Int[Tensor, "chosen"], *, sinks: int = 1
) -> pd.DataFrame:
    """How much more attention damaged slots draw than the same positions with clean content.

    One row per layer and head, means over the queries: `damaged` and `clean` are the slots' share of the attention that
    does not go to the sink, and `lift` is their ratio (1 is no change; NaN where the clean slots draw nothing).

    Args:
        slots: of the cache, none of them a sink.
        sinks: how many of the first live slots are the sink.

    Raises:
        UserError: the two differ in their positions, layers or queries, or a slot is a sink or not there.
    """
    ledger = clean.cache.ledger
    if not torch.equal(damaged.cache.ledger.positions, ledger.positions):
        raise UserError("The damaged and the clean run are at different positions; give two runs with the same slots.")
    _refuse_others(damaged, clean, damaged.queries)
    index = refuse_missing(clean, slots)
    sink = ledger.live_somewhere[0].nonzero()[:sinks, 0]
    if bool(torch.isin(index, sink).any()):
        raise UserError(
            f"Slots {sink.tolist()} are the sink, whose attention is not counted; leave them out of `slots`."
        )

    def share(patterns: Patterns) -> Tensor:
        return (patterns.mass(slots=index) / (1 - patterns.mass(slots=sink)).clamp(min=torch.finfo().eps)).mean(-1)

    table = {"damaged": share(damaged), "clean": share(clean)}
    ratio = table["damaged"] / table["clean"]
    return _table(clean, table | {"lift": ratio.masked_fill(table["clean"] == 0, torch.nan)})


def _places(before: Patterns, after: Patterns, hide: str | Sequence[str]) -> Int[Tensor, "slots_after"]:
    """The slot of `before` for each slot of `after`, where only hidden slots may be missing."""
    ledger = before.cache.ledger
    visible, places = ~(ledger.in_segments(hide) | ledger.padding)[0], aligned(ledger, after.cache.ledger)
    if places is None or int(visible[places].sum()) < int(visible.sum()):
        raise UserError(
            f"The patterns after are not of the slots before without {', '.join(names_of(hide))}; read the same text "
            "after the same cache, before and after masking or evicting those segments."
        )
    _refuse_others(before, after, places[after.queries])
    return places


def _refuse_others(one: Patterns, other: Patterns, queries: Int[Tensor, "queries"]) -> None:
    """Refuse patterns of different layers or queries.

    Args:
        queries: those of `other`, as slots of `one`.
    """
    refuse_other_model(one.cache, other.cache, "The other run")
    if one.layers != other.layers or not torch.equal(one.queries, queries):
        raise UserError("The two patterns are of different layers or queries; ask `attend` for the same in both.")


def _table(patterns: Patterns, columns: dict[str, Float[Tensor, "layers heads"]]) -> pd.DataFrame:
    """One row per layer and head, named by its head (L8H0)."""
    axes = {"layer": patterns.layers, "head": range(patterns.weights.shape[1])}
    return named_by_head(crossed(axes, {name: values.cpu().numpy() for name, values in columns.items()}))
