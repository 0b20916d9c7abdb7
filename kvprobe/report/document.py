"""What pages show beside numbers, as data. All text in it is plain and untrusted; the renderer escapes it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprobe.plain_data import Limits
from kvprobe.text.transcript import Message, Transcript

LIMITS = Limits(text=2**25, entries=100_000)
"""Of a report as data; its longest texts are packed attention weights."""


@dataclass(frozen=True)
class Passage:
    """A message of an example conversation; `marked` is a text in it that stands out."""

    segment: str
    role: str
    text: str
    masked: bool = False
    marked: str | None = None


@dataclass(frozen=True)
class SeenPassage:
    """A message on the page of an instrument, and in what state of the cache it was read."""

    segment: str
    role: str
    text: str
    masked: bool
    note: str


def chat_record(
    chat: Transcript,
    *,
    masked: Collection[str] = (),
    marked: str | None = None,
    only_in: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """The messages of a conversation as passages, as JSON holds them.

    Args:
        masked: segments that are masked.
        marked: a text to mark wherever it occurs.
        only_in: the segments in which it is marked; all by default.
    """

    def mark(message: Message) -> str | None:
        applies = only_in is None or message.segment in only_in
        return marked if marked and applies and marked in message.said else None

    return [
        vars(Passage(message.segment, message.role, message.said, message.segment in masked, mark(message)))
        for message in chat.messages
    ]


@dataclass(frozen=True)
class HeatMap:
    """Values around zero on a grid, as an interactive map, whose rows go as `kvprobe.report.orientation` says.

    Attributes:
        rows, columns: their labels; a cell reads "row_axis row, column_axis column: value unit".
        values: [rows][columns]; `None` for no value.
        unit: what follows a value, such as "of the way".
        scale: the value of full colour, which related maps share; by default the largest of this map.
    """

    caption: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[int | float | None]]
    unit: str
    row_axis: str
    column_axis: str
    scale: int | float | None = None


@dataclass(frozen=True)
class TokenView:
    """A text whose tokens are coloured by their values, of one or more kinds.

    Attributes:
        labels: names of the kinds.
        values: [labels][tokens].
    """

    caption: str
    tokens: Sequence[str]
    labels: Sequence[str]
    values: Sequence[Sequence[int | float]]


@dataclass(frozen=True)
class AttentionView:
    """Attention of chosen queries, in a layer and head that the reader picks; before and after, if there is `after`.

    Texts of packed numbers, one per layer, are those that `kvprobe.report.views.packing` makes.

    Attributes:
        tokens: the text of every slot.
        layers, heads: their labels.
        queries: the slots that attend, in order.
        weights: packed.
        masked, damaged: slots that are crossed out, and slots that are marked.
        index: [layers][heads], a number beside each head; `None` for no number. The largest head is shown first.
        index_name: what that number is.
        segments: the label of every slot, such as its segment and role; none where empty.
        values: packed norms of values, by which the reader may weight attention; a 0 is a slot that the head may not
            see. None where empty: `masked` slots are then hidden from every head.
        after, values_after: weights and norms of the same queries after an operation on the cache.
    """

    caption: str
    tokens: Sequence[str]
    layers: Sequence[str]
    heads: Sequence[str]
    queries: Sequence[int]
    weights: Sequence[str] = field(repr=False)
    masked: Sequence[int] = ()
    damaged: Sequence[int] = ()
    index: Sequence[Sequence[int | float | None]] | None = None
    index_name: str = ""
    segments: Sequence[str] = field(default_factory=list[str])
    values: Sequence[str] = field(default_factory=list[str], repr=False)
    after: Sequence[str] = field(default_factory=list[str], repr=False)
    values_after: Sequence[str] = field(default_factory=list[str], repr=False)
