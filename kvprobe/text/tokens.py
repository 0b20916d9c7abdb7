"""Runs of tokens with what a ledger needs to know of each."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Protocol, runtime_checkable

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief, Table, brief
from kvprobe.errors import UserError
from kvprobe.names import unknown

PREAMBLE = "preamble"
"""Segment of what the chat template writes before the first message: start token, default system prompt. It stays when
messages are hidden."""
GENERATED = "generated"
"""Segment of the tokens that a model generated and then read."""
ANSWER_HEADER = "generation"
"""Segment of the header, and where it has one the lead, of the answer that the model is to give."""

_RESERVED = {
    PREAMBLE: "what the template writes first is",
    GENERATED: "tokens of the model are",
    ANSWER_HEADER: "the header of the answer is",
}

PART_OF_CHARACTER = "⋯"
"""Text of a token that holds only some bytes of a character, which a later token completes."""

COLUMNS = ("ids", "positions", "segments", "parts", "recomputed", "delimiters")
"""Fields with one entry for each token."""

WITHOUT_TOKEN = "⟨fitted⟩"
"""Shown for a slot that holds no token."""
_BROKEN = "\ufffd"
_LONGEST_RUN = 16
"""Tokens within which a character ends: four bytes each of the next characters that share tokens."""


@runtime_checkable
class Decoder(Protocol):
    """What gives tokens their text, such as a Hugging Face tokenizer."""

    def decode(self, token_ids: Sequence[int], /, *, skip_special_tokens: bool = ...) -> str: ...


@checked_arguments
@dataclass(frozen=True, repr=False)
class Tokens(Brief):
    """A run of tokens with what the ledger needs to know of each.

    Attributes:
        ids: vocabulary ids.
        positions: logical index of each token.
        segments: segment name of each token.
        parts: name of the message part that the token belongs to, or None.
        recomputed: true from the first token that stands after text that was left out; of a conversation that is
            rendered anew, from the first one that is another than in the whole conversation.
        delimiters: true for tokens of the chat template that are not a message's text.
        end: the position of what comes next, where hidden text at the end keeps its place; None for right after.
        dropped: thoughts of messages that the chat template does not write again, by segment.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    segments: tuple[str, ...]
    parts: tuple[str | None, ...] = field(repr=False)
    recomputed: tuple[bool, ...] = field(repr=False)
    delimiters: tuple[bool, ...] = field(repr=False)
    end: int | None = None
    dropped: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)

    @classmethod
    def of(cls, ids: Sequence[int], segment: str = "prompt", start: int = 0) -> "Tokens":
        """Plain token ids as one segment, at consecutive positions from `start`.

        Raises:
            UserError: an id or the start is below zero.
        """
        if wrong := [number for number in (start, *ids) if number < 0]:
            raise UserError(f"{wrong[0]} is not a token id or position; give whole numbers of at least 0.")
        count = len(ids)
        return cls(
            tuple(ids),
            tuple(range(start, start + count)),
            (segment,) * count,
            (None,) * count,
            (False,) * count,
            (False,) * count,
        )

    def _facts(self) -> Iterable[str]:
        counts = Counter(self.segments)
        yield f"{len(self)} tokens"
        yield f"segments={brief(counts)}"
        yield f"ids={brief(self.ids)}"
        if self.positions:
            yield f"positions {self.positions[0]} to {self.positions[-1]}"
        if self.dropped:
            yield f"thoughts that the template drops: {brief(self.dropped)}"

    def _table(self) -> Table:
        return COLUMNS, zip(*(getattr(self, column) for column in COLUMNS), strict=True)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: slice) -> "Tokens":
        columns = {name: getattr(self, name)[where] for name in COLUMNS}
        return self._with(columns, self.end if where.indices(len(self))[1] == len(self) else None)

    def __add__(self, other: "Tokens") -> "Tokens":
        columns = {name: getattr(self, name) + getattr(other, name) for name in COLUMNS}
        return replace(other, **columns, dropped={**self.dropped, **other.dropped})

    def at(self, places: Sequence[int]) -> "Tokens":
        """The tokens at these places, in this order, at their own positions."""
        columns = {name: tuple(getattr(self, name)[place] for place in places) for name in COLUMNS}
        return self._with(columns, self.end if places and places[-1] == len(self) - 1 else None)

    def _with(self, columns: Mapping[str, Any], end: int | None) -> "Tokens":
        """Some of the tokens, of which the position of what comes next may be known."""
        dropped = {name: text for name, text in self.dropped.items() if name in columns["segments"]}
        return replace(self, **columns, end=end, dropped=dropped)

    @property
    def names(self) -> tuple[str, ...]:
        """Segment names in order of first appearance."""
        return tuple(dict.fromkeys(self.segments))

    @property
    def following(self) -> int:
        """The position of the token that comes next."""
        return max(self.positions[-1:], default=-1) + 1 if self.end is None else self.end

    def span(self, segment: str) -> slice:
        """Where a segment stands; an unknown or interrupted segment is refused.

        A header that stands before a system message, which the template folds into the turn, is not in its span.
        """
        first = next((index for index, name in enumerate(self.segments) if name == segment), 0)
        apart = first
        while apart < len(self) and self.segments[apart] == segment and self.delimiters[apart]:
            apart += 1
        rest = self.segments[apart:]
        if segment in rest and rest[0] != segment:
            within = _span(rest, "segment", segment)
            return slice(within.start + apart, within.stop + apart)
        return _span(self.segments, "segment", segment)

    def part(self, name: str) -> slice:
        """Where a named part of a message stands; an unknown or interrupted part is refused."""
        return _span(self.parts, "part", name)

    def text_runs(self, segment: str) -> list[list[int]]:
        """The places of a segment's text, run by run between the chat template's delimiters; an unknown or interrupted
        segment is refused."""
        whole = self.span(segment)
        runs = groupby(range(whole.start, whole.stop), self.delimiters.__getitem__)
        return [list(run) for delimiter, run in runs if not delimiter]

    def divided(self, part: str) -> "Tokens":
        """The same tokens with a part of a message as a segment of its own, and what stands around it in its segment as
        two more: with the part `value` of segment `fact` these are `fact before`, `value` and `fact after`.

        Raises:
            UserError: an unknown or interrupted part, or a segment that is interrupted.
        """
        within = self.part(part)
        start: int = within.start
        name = self.segments[start]
        whole, segments = self.span(name), list(self.segments)
        segments[whole.start : within.start] = [f"{name} before"] * (within.start - whole.start)
        segments[within] = [part] * (within.stop - within.start)
        segments[within.stop : whole.stop] = [f"{name} after"] * (whole.stop - within.stop)
        return replace(self, segments=tuple(segments))

    def shifted(self, start: int) -> "Tokens":
        """The same tokens with the first one at position `start`."""
        shift = start - self.positions[0] if self.positions else 0
        end = None if self.end is None else self.end + shift
        return replace(self, positions=tuple(position + shift for position in self.positions), end=end)

    def answered(self, reply: Sequence[int], segment: str = GENERATED) -> "Tokens":
        """These tokens and all of a reply but its last token, after which nothing is read: the logits after the last
        `len(reply)` of them are those that each token of the reply met."""
        return self + Tokens.of(reply[:-1], segment, self.following)


def refuse_reserved(names: Iterable[str]) -> None:
    """Refuse names for segments that say who wrote them, by which the end of an answer is known to be unread."""
    for name in names:
        if name in _RESERVED:
            raise UserError(f"A segment is called {name!r}, as {_RESERVED[name]}; give it another name.")


def token_texts(ids: Sequence[int], tokenizer: "Decoder | None") -> tuple[str, ...]:
    """The text of each token, control tokens included; none without a tokenizer.

    Where a character is made of several tokens, the last of them has it and the others have `PART_OF_CHARACTER`.
    """
    if tokenizer is None:
        return ()
    texts = [tokenizer.decode([number]) if number >= 0 else WITHOUT_TOKEN for number in ids]
    place = 0
    while place < len(ids):
        if _BROKEN not in texts[place]:
            place += 1
            continue
        runs = range(place + 2, min(place + _LONGEST_RUN, len(ids)) + 1)
        stop = next((stop for stop in runs if _BROKEN not in tokenizer.decode(ids[place:stop])), place + 1)
        shown = 0
        for end in range(place + 1, stop + 1) if stop > place + 1 else ():
            so_far = tokenizer.decode(ids[place:end])
            whole = so_far.rstrip(_BROKEN)
            texts[end - 1] = whole[shown:] + (PART_OF_CHARACTER if whole != so_far else "")
            shown = len(whole)
        place = stop
    return tuple(texts)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """How many of the first characters, ids or whatever else of the two are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _span(names: Sequence[str | None], kind: str, name: str) -> slice:
    places = [index for index, other in enumerate(names) if other == name]
    if not places:
        raise UserError(unknown(kind, name, dict.fromkeys(other for other in names if other is not None)))
    if any(after != before + 1 for before, after in pairwise(places)):
        raise UserError(f"The {kind} {name!r} stands in more than one place; give each place its own name.")
    return slice(places[0], places[-1] + 1)
