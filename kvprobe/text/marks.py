"""Which text of a message each character of a rendered conversation is.

The template writes the conversation twice: as it is, and with the characters of each text replaced by a mark of that
text. Kept are the characters that a template may look at: white space, quotes, and the string constants of its source
(`</think>`). The two must be equally long and equal wherever there is no mark, and what stands at the marks of a text
must be its characters, in order. So places are known, and proved, also where a template trims, quotes as JSON, cuts
thoughts out or writes messages in another order; nothing is searched.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from kvprobe.checks import is_list, is_mapping
from kvprobe.text.messages import CALLS

UNMARKED_FIELDS = frozenset({"role", "name", "id", "type", "tool_call_id"})
"""Names that a template compares; they belong to the turn like its delimiters."""
CALLED = ("function", "name")
"""Where the name of a tool stands in a call of it."""

_FIRST_MARK, _LAST_MARK = 0x20000, 0x2A6DD  # ideographs: printable, without case, no space, and rare


@dataclass(eq=False)
class Text:
    """One string of a message.

    Attributes:
        message: its index.
        source: field of the message: `content`, `reasoning_content`, `tool_calls` …
        item: of a content in parts; None where the content is one string.
        name: it is that of a tool that is called.
        marked: the offsets that a mark stands for.
        at: where the marks are in the rendering.
        places: offset of each character of the rendering that is this text's.
    """

    text: str
    message: int
    source: str
    item: int | None
    mark: str
    name: bool = False
    marked: list[int] = field(default_factory=list[int])
    at: list[int] = field(default_factory=list[int])
    places: dict[int, int] = field(default_factory=dict[int, int])

    def replaced(self, sought: re.Pattern[str]) -> str:
        """The text with marks."""
        text = self.text
        kept = {index for match in sought.finditer(text) for index in range(*match.span())}
        kept |= {*range(len(text) - len(text.lstrip())), *range(len(text.rstrip()), len(text))}
        plain = [index for index, letter in enumerate(text) if letter.isprintable() and letter not in "\"'\\"]
        self.marked = [index for index in plain if index not in kept] or [
            index for index, letter in enumerate(text) if not letter.isspace()
        ]
        letters = list(text)
        for index in self.marked:
            letters[index] = self.mark
        return "".join(letters)

    def place(self, rendered: str, trimmed: bool) -> bool:
        """Whether what is rendered at the marks are this text's characters, in order; then they are its places.

        Where some are missing the last of them are taken, because templates drop what comes first: thoughts.

        Args:
            trimmed: the template takes white space off its ends.
        """
        if self.name:
            del self.at[len(self.marked) :]  # the name of a tool may also stand in the header of its result
        left = len(self.marked)
        for place in reversed(self.at):
            left -= 1
            while left >= 0 and self.text[self.marked[left]] != rendered[place]:
                left -= 1
            if left < 0:
                return False
            self.places[place] = self.marked[left]
        if not self.at:
            return True
        for here, there in pairwise(self.at):
            self._fill(rendered, here + 1, there, self.places[here] + 1, self.places[there])
        first, last = self.at[0], self.at[-1]
        start = len(self.text) - len(self.text.lstrip()) if trimmed else 0
        end = len(self.text.rstrip()) if trimmed else len(self.text)
        for written in _written(self.text[start : self.places[first]]):
            if self.places[first] == self.marked[0] and rendered.endswith(written, 0, first):
                self._fill(rendered, first - len(written), first, start, self.places[first])
        for written in _written(self.text[self.places[last] + 1 : end]):
            if rendered.startswith(written, last + 1):
                self._fill(rendered, last + 1, last + 1 + len(written), self.places[last] + 1, end)
        return True

    def _fill(self, rendered: str, start: int, stop: int, first: int, last: int) -> None:
        """Places from `start` to `stop` of the characters from `first` to `last`, which had no mark."""
        if rendered[start:stop] == self.text[first:last]:
            self.places.update(zip(range(start, stop), range(first, last), strict=True))
        elif rendered[start:stop] in _written(self.text[first:last]):
            self.places.update(dict.fromkeys(range(start, stop), first))

    @property
    def dropped(self) -> str:
        """What of it the template did not write."""
        written = set(self.places.values())
        missing = [offset for offset in self.marked if offset not in written]
        if not missing or not written:
            return self.text if missing else ""
        first = min(written)
        return self.text[:first] if missing[-1] < first else "".join(self.text[offset] for offset in missing)


def _written(text: str) -> tuple[str, ...]:
    """A text as it is, and as it stands within a JSON text or a printed one of Python."""
    return text, json.dumps(text, ensure_ascii=False)[1:-1], repr(text)[1:-1]


class Marks:
    """A conversation with marks in place of its texts."""

    def __init__(self, messages: Sequence[Mapping[str, object]], sought: re.Pattern[str], used: str) -> None:
        """Args:
        sought: what a template may look for in a text.
        used: a text with whose characters no mark must be confused.
        """
        self.texts: list[Text] = []
        self._free = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK) if chr(code) not in set(used))
        self.messages: list[dict[str, object]] = []
        for index, message in enumerate(messages):
            count = len(self.texts)
            written = {name: self._marked(value, sought, index, name, name) for name, value in message.items()}
            if len(self.texts) == count:  # a call without arguments: the name of the tool, then
                written = {
                    name: self._marked(value, sought, index, name, "call" if name in CALLS else name)
                    for name, value in message.items()
                }
            self.messages.append(written)

    def _marked(
        self, value: object, sought: re.Pattern[str], message: int, source: str, key: str, item: int | None = None
    ) -> object:
        """The value with marks in its texts.

        Args:
            source: field of the message.
            key: of the value itself; `call` also marks the names of tools in it.
        """
        if isinstance(value, str):
            if not value.strip() or key in UNMARKED_FIELDS:
                return value
            self.texts.append(Text(value, message, source, item, next(self._free), key == "call"))
            return self.texts[-1].replaced(sought)
        if is_mapping(value):
            called = key == "call"
            return {
                name: self._marked(inner, sought, message, source, "call" if called and name in CALLED else name, item)
                for name, inner in value.items()
            }
        if is_list(value) or isinstance(value, tuple):
            return [
                self._marked(inner, sought, message, source, key, number if source == key == "content" else item)
                for number, inner in enumerate(cast(Sequence[object], value))
            ]
        return value

    def place(self, rendered: str, marked: str, trimmed: bool) -> bool:
        """Whether the two renderings agree, and no text is torn apart by another; then each text has its places."""
        of_mark = {text.mark: text for text in self.texts}
        if len(rendered) != len(marked):
            return False
        for place, (letter, mark) in enumerate(zip(rendered, marked, strict=True)):
            if mark in of_mark:
                of_mark[mark].at.append(place)
            elif letter != mark:
                return False
        placed = all(text.place(rendered, trimmed) for text in self.texts)
        spans = self.spans()
        return placed and all(before.stop <= after.start for (_, before), (_, after) in pairwise(spans))

    def spans(self) -> list[tuple[int, slice]]:
        """Messages that have marks, in the order in which they are written, from the first mark to the last."""
        at: dict[int, list[int]] = {}
        for text in self.texts:
            at.setdefault(text.message, []).extend(text.at)
        spans = [(message, slice(min(places), max(places) + 1)) for message, places in at.items() if places]
        return sorted(spans, key=lambda one: one[1].start)
