"""The messages of a conversation, from mappings of role and content."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvprobe.brief import Brief
from kvprobe.checks import is_mapping, is_text
from kvprobe.errors import UserError


@dataclass(frozen=True, repr=False)
class Part(Brief):
    """A piece of a message's text; `Tokens.part` gives the place of a named one."""

    text: str
    name: str | None = None


@dataclass(frozen=True, repr=False)
class Message(Brief):
    """One message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant`, or another that the chat template knows.
        parts: the text, in order.
        segment: name of the segment that the message (with its delimiters) belongs to.
    """

    role: str
    parts: tuple[Part, ...]
    segment: str

    def __post_init__(self) -> None:
        # More than a word could forge the header of another message in a template of plain words.
        if not is_text(self.role) or not re.fullmatch(r"[\w-]+", self.role):
            raise UserError(f"A message has the role {str(self.role)[:40]!r}; a role is one word, such as 'user'.")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def message_of(index: int, message: object, segment: str) -> Message:
    """The message of a mapping, in this segment.

    Args:
        index: of the message in its conversation, for error sentences.

    Raises:
        UserError: the mapping is not `{"role": …, "content": …}`, or holds no text.
    """
    if not is_mapping(message):
        raise UserError(f"Message {index} is a {type(message).__name__}; give {{'role': …, 'content': …}}.")
    if missing := {"role", "content"} - set(message):
        raise UserError(f"Message {index} has no {' and no '.join(sorted(missing))}; give {{'role': …, 'content': …}}.")
    if others := sorted(str(field) for field in set(message) - {"role", "content"}):
        raise UserError(f"Message {index} has the field {others[0]!r}, which is not read; write it into the content.")
    role, content = message["role"], message["content"]
    pieces = [content] if isinstance(content, str) else content
    if not isinstance(pieces, Sequence):
        raise UserError(f"Message {index} has a {type(content).__name__} for content; give a text, or a list of texts.")
    parts = tuple(_part(index, piece) for piece in cast(Sequence[object], pieces))
    if not "".join(part.text for part in parts).strip():
        raise UserError(f"Message {index} ({segment!r}) is empty; a segment needs at least one token.")
    return Message(role, parts, segment)


def _part(index: int, piece: object) -> Part:
    if isinstance(piece, str):
        return Part(piece)
    if not is_mapping(piece) or not isinstance(piece.get("text"), str) or piece.get("type", "text") != "text":
        raise UserError(f"Message {index} has a part without text; give texts or {{'text': …, 'name': …}}.")
    if others := sorted(str(field) for field in set(piece) - {"type", "text", "name"}):
        raise UserError(f"Message {index} has a part with the field {others[0]!r}, which is not read; leave it out.")
    name = piece.get("name")
    if name is not None and not isinstance(name, str):
        raise UserError(f"Message {index} has a part called {str(name)[:40]!r}; a name must be a text.")
    return Part(piece["text"], name)
