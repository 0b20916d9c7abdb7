"""How a ledger shows itself: its segments with how much of each is live, as text, as a table and as a strip."""

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.brief import cut, table_html
from kvprobe.cache.entries import entries

MOST_SEGMENTS = 8
"""Of a line of text."""
MOST_RUNS = 400
"""Of a strip."""


@runtime_checkable
class Segmented(Protocol):
    """A ledger, as far as it is shown; see `kvprobe.cache.ledger.Ledger`."""

    @property
    def batch(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def segments(self) -> Int[Tensor, "batch slots"]: ...
    @property
    def positions(self) -> Int[Tensor, "batch slots"]: ...
    @property
    def recomputed(self) -> Bool[Tensor, "batch slots"]: ...
    @property
    def fitted(self) -> Bool[Tensor, "batch slots"]: ...
    @property
    def edited(self) -> Bool[Tensor, "batch slots"]: ...
    @property
    def live(self) -> Bool[Tensor, "layers batch kv_heads slots"]: ...


class Segment(NamedTuple):
    """One segment in a cache.

    Attributes:
        slots: of all rows together.
        positions: first and last.
        live: share of its slots that later queries may attend to, over layers, KV heads and rows.
        recomputed: share of its slots that were computed without text that had been before them.
        fitted: share of its slots that have no token.
        edited: share of its slots of which numbers were changed after they were computed.
    """

    segment: str
    slots: int
    positions: str
    live: float
    recomputed: float
    fitted: float
    edited: float

    def __str__(self) -> str:
        live = "" if self.live == 1 else " masked" if self.live == 0 else f" {self.live:.0%} live"
        made = "".join(
            f" {name}" if share == 1 else f" {share:.0%} {name}"
            for name, share in (("fitted", self.fitted), ("edited", self.edited))
            if share
        )
        return f"{cut(self.segment, 40)} {self.slots}{live}{made}"


def segments(ledger: Segmented) -> list[Segment]:
    """The segments that have slots, in order."""
    live = ledger.live.float().mean((0, 2))
    parts: list[Segment] = []
    for index, name in enumerate(ledger.names):
        inside = ledger.segments == index
        if not bool(inside.any()):
            continue
        positions = ledger.positions[inside]
        span = f"{int(positions.min())} to {int(positions.max())}"
        columns = (live, ledger.recomputed, ledger.fitted, ledger.edited)
        shares = [float(column[inside].float().mean()) for column in columns]
        parts.append(Segment(name, int(inside.sum()), span, *shares))
    return parts


def facts(ledger: Segmented) -> Iterator[str]:
    """Rows and slots, and each segment with its slots and how much of it is live."""
    yield f"{ledger.batch} × {ledger.slots} slots"
    listed = segments(ledger)
    more = f", … {len(listed)} segments in all" if len(listed) > MOST_SEGMENTS else ""
    yield f"segments: {', '.join(map(str, listed[:MOST_SEGMENTS]))}{more}" if listed else "no segments"


def html(ledger: Segmented) -> str:
    """The first row as a strip, a piece for each run of slots, paler where fewer layers and heads see them; and the
    table of segments."""
    live = entries(ledger.live.float().mean((0, 2))[0], float)
    slots = entries(ledger.segments[0], int)
    runs = [(place, len(list(run))) for place, run in groupby(zip(slots, live, strict=True))][:MOST_RUNS]
    pieces = "".join(_piece(ledger.names, index, share, count) for (index, share), count in runs)
    strip = f'<div style="display:flex;height:1.6em;max-width:60em;margin:.4em 0">{pieces}</div>'
    listed = segments(ledger)
    seldom = ("fitted", "edited")
    columns = [name for name in Segment._fields if name not in seldom or any(getattr(one, name) for one in listed)]
    return strip + table_html(columns, ([getattr(one, name) for name in columns] for one in listed))


def _piece(names: tuple[str, ...], index: int, live: float, count: int) -> str:
    name = "padding" if index < 0 else names[index]
    hue = 0 if index < 0 else index * 137 % 360
    label = escape(f"{cut(name, 60)}: {count} slots, {live:.0%} live", quote=True)
    style = f"flex:{count};background:hsl({hue},60%,60%);opacity:{0.15 + 0.85 * live:.2f};overflow:hidden"
    return f'<span title="{label}" style="{style}">{escape(cut(name, 20))}</span>'
