"""Where the turns of a rendered conversation begin: the preamble, and the header and the trailer of each message.

What no message owns, such as the start token and a default system prompt, is the preamble. A header belongs to the turn
that it opens, also where the template folds a system message into the user's turn. Borders are found by rendering the
beginnings of the conversation: what follows a message when it is the last belongs to it, up to the tag that closes it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

from jinja2 import TemplateError

from kvprobe.text.tokens import common_length

Messages = Sequence[Mapping[str, object]]
Render = Callable[..., str]
"""Messages to text, without the header of an answer."""

FOLDED = ("system", "developer")
"""Roles whose messages a template may write into a user's turn."""
_PROBES = "\U00020000\U00020001\U00020002\U00020003"
_CLOSES = re.compile(
    r"[<\[](?![^>\]]*(?:header|role|think))[^<>\[\]\s]*(?:/|(?<![a-z])(?:end|eo[tms]))[^<>\[\]\s]*[>\]]\s*",
    re.IGNORECASE,
)
"""A tag that ends a turn, such as `<|end|>` or `[/INST]`: some templates write the next header right after it, whatever
comes next, if anything does."""


class Headers:
    """The borders between the messages of one conversation.

    Attributes:
        messages: with marks in place of their texts.
        marks: of each message.
        start_token: of the tokenizer; may be empty.
    """

    def __init__(self, messages: Messages, marks: Sequence[str], render: Render, start_token: str) -> None:
        self.messages, self.marks, self.start_token = messages, marks, start_token
        self._render = render
        # In ChatML the token of this name opens each turn: as part of a header, it is not written for the conversation.
        if self._user.startswith(start_token) and not self._writes_start_token:
            self.start_token = ""

    def opening(self, first: int, text: str) -> tuple[str, str]:
        """The preamble, and the header of the `first` message: the `text` before it."""
        if self.messages[first]["role"] == "user":
            preamble = self._before_user(text)
        else:
            starts = [start for start in (self._default, _space(text)) if self._default.startswith(start)]
            preamble = max((*filter(text.startswith, starts), self._start(text)), key=len)
        return preamble, text[len(preamble) :]

    def between(self, before: int, after: int | None, text: str) -> list[tuple[int, str]]:
        """The `text` between the marks of two messages, in pieces with the message of each: what ends the first, all of
        messages that have no mark, and the header of the second.

        Args:
            after: None for the end of the conversation.
        """
        unmarked = range(before + 1, len(self.messages) if after is None else after)
        owners = [before, *(index for index in unmarked if not self.marks[index])]
        ends = [0]
        for owner in owners:
            ending = self._after_last_mark(self.messages[: owner + 1])
            end = len(text) if ending is None else _shared(ending, text)
            if end == len(text):
                # A template that cannot end here, or that never ends without the header of an answer.
                header = self._header("assistant" if after is None else str(self.messages[after]["role"]))
                end = text.rindex(header) if header and header in text else end
            ends.append(max(end, ends[-1]))
        pieces = [(owner, text[start:end]) for owner, (start, end) in zip(owners, pairwise(ends), strict=True)]
        return pieces if after is None else [*pieces, (after, text[ends[-1] :])]

    def folded(self, message: int, into: int, text: str) -> int:
        """How much of the `text` before a message stands there also without it, before the user's message that the
        template folds it into; 0 where it has a turn of its own."""
        if self.messages[message]["role"] not in FOLDED:
            return 0
        rendered = self._written([other for other in self.messages if other["role"] not in FOLDED]) or ""
        before = rendered.partition(self.marks[into][0])[0]
        alone = before[self._past_marks(before) :]
        return len(alone) if alone.strip() and text.startswith(alone) else 0

    @cached_property
    def _default(self) -> str:
        """The preamble of a conversation that begins with a user's turn; with a default system prompt, where there is
        one."""
        written = self._written([{"role": "user", "content": _PROBES[0]}]) or ""
        return self._before_user(written.partition(_PROBES[0])[0])

    @cached_property
    def _user(self) -> str:
        return self._header("user")

    @cached_property
    def _writes_start_token(self) -> bool:
        """Whether the template begins with the start token that it is given, whichever that is."""
        probe = [{"role": "user", "content": _PROBES[0]}]
        return (self._written(probe, bos_token=_PROBES[1]) or "").startswith(_PROBES[1])

    def _before_user(self, text: str) -> str:
        """What stands before the header of a user's turn that opens the conversation; a start token at least, and all
        where no header is known."""
        return (text[: max(text.rfind(self._user), 0)] if self._user else text) or self._start(text)

    def _start(self, text: str) -> str:
        """The start token, and the space that may stand before it."""
        start = _space(text) + self.start_token
        return start if self.start_token and text.startswith(start) else ""

    def _header(self, role: str) -> str:
        """What opens a later turn of this role, without space around it; empty where it is not known."""
        roles = [*("user", "assistant", "user")[: 3 if role == "assistant" else 2], role]
        probe = [{"role": role, "content": mark} for role, mark in zip(roles, _PROBES, strict=False)]
        whole, shorter = self._written(probe), self._written(probe[:-1])
        last, mark = _PROBES[len(roles) - 2 : len(roles)]
        if whole is None or shorter is None or last not in shorter or not whole.find(last) < whole.find(mark):
            return ""
        gap, ending = whole[whole.index(last) + 1 : whole.index(mark)], shorter[shorter.index(last) + 1 :]
        header = gap[_shared(ending, gap) :].strip()
        return header if header or _CLOSES.search(gap) else gap.strip()

    def _written(self, messages: Messages, **variables: str) -> str | None:
        """What the template writes; None where it refuses these messages."""
        try:
            return self._render(messages, **variables) if messages else None
        except TemplateError:
            return None

    def _after_last_mark(self, messages: Messages) -> str | None:
        rendered = self._written(messages)
        past = 0 if rendered is None else self._past_marks(rendered)
        return rendered[past:] if rendered is not None and past else None

    def _past_marks(self, rendered: str) -> int:
        """The place after the last mark; 0 without one."""
        marks = set("".join(self.marks))
        return next((place + 1 for place in range(len(rendered) - 1, -1, -1) if rendered[place] in marks), 0)


def _space(text: str) -> str:
    """The white space that it begins with."""
    return text[: len(text) - len(text.lstrip())]


def _shared(ending: str, text: str) -> int:
    """How much of the text is the ending, or the beginning of it up to a whole word or tag; without a header in it."""
    end = common_length(ending, text)
    while 0 < end < min(len(ending), len(text)) and (text[end - 1] in "<[|" or text[end - 1 : end + 1].isalnum()):
        end -= 1
    closed = max((tag.end() for tag in _CLOSES.finditer(text, 0, end)), default=end)
    return closed if text[closed:end].strip() else end
