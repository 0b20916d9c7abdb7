"""The messages of a conversation, from mappings of role, content and whatever else a chat template reads."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvprobe.brief import Brief
from kvprobe.checks import is_mapping, is_text
from kvprobe.errors import UserError

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of what a model thought before it answered; transformers gives each to templates under the names of others."""
MAX_DEPTH = 32

_EXPECTED = "give {'role': …, 'content': …}"
RESULTS = ("tool", "function", "ipython")
"""Roles of the results of tools, which may be empty."""
_BESIDE = ("cache_control", "annotations", "logprobs")
"""Fields of a part that say nothing that a model reads."""
_TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are text, as OpenAI names them."""


@dataclass(frozen=True, repr=False)
class Part(Brief):
    """A piece of a message's text; `Tokens.part` gives the place of a named one."""

    text: str
    name: str | None = None


@dataclass(frozen=True, repr=False)
class Message(Brief):
    """One message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant`, `tool`, or another that the chat template knows.
        parts: the text, in order; empty where there is only a call of a tool.
        segment: name of the segment that the message (with its delimiters) belongs to.
        fields: what else a chat template may read: `tool_calls`, `tool_call_id`, `name`, `reasoning_content` …
        typed: the parts were given as `{"type": "text", "text": …}`, which some templates write one by one.
    """

    role: str
    parts: tuple[Part, ...]
    segment: str
    fields: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    typed: bool = False

    def __post_init__(self) -> None:
        # More than a word could forge the header of another message in a template of plain words.
        if not is_text(self.role) or not re.fullmatch(r"[\w-]+", self.role):
            raise UserError(f"A message has the role {str(self.role)[:40]!r}; a role is one word, such as 'user'.")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def said(self) -> str:
        """All that a reader should see: thoughts, text and calls of tools."""
        thoughts = [text for name in REASONING if is_text(text := self.fields.get(name))][:1]
        calls = [json.dumps(self.fields[name], ensure_ascii=False) for name in CALLS if name in self.fields]
        return "\n".join([*thoughts, *([self.text] if self.parts else []), *calls])

    def given(self, typed: bool) -> dict[str, object]:
        """As a chat template takes it, with typed parts one by one or joined."""
        if not self.parts:
            return {"role": self.role, **self.fields}
        parts = [{"type": "text", "text": part.text} for part in self.parts]
        return {"role": self.role, "content": parts if typed and self.typed else self.text, **self.fields}


CALLS = ("tool_calls", "function_call")


def message_of(index: int, message: object, segment: str) -> Message:
    """The message of a mapping, in this segment.

    Args:
        index: of the message in its conversation, for error sentences.

    Raises:
        UserError: the mapping is not `{"role": …, "content": …}` with fields of plain data, or holds no text.
    """
    if not is_mapping(message):
        raise UserError(f"Message {index} is a {type(message).__name__}; {_EXPECTED}.")
    fields = {
        str(name): value for name, value in message.items() if name not in ("role", "content") and value is not None
    }
    for _ in texts_within(fields, f"Message {index}"):
        pass
    content = message.get("content")
    speaks = any(fields.get(name) for name in (*CALLS, *REASONING))
    missing = [*(["content"] if content is None and not speaks else []), *({"role"} - set(message))]
    if missing:
        raise UserError(f"Message {index} has no {' and no '.join(missing)}; {_EXPECTED}.")
    pieces = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(pieces, Sequence):
        raise UserError(f"Message {index} has a {type(content).__name__} for content; give a text, or a list of texts.")
    pieces = cast(Sequence[object], pieces)
    parts = tuple(_part(index, piece) for piece in pieces)
    if not "".join(part.text for part in parts).strip() and not speaks and message["role"] not in RESULTS:
        raise UserError(f"Message {index} ({segment!r}) is empty; a segment needs at least one token.")
    typed = bool(pieces) and all(is_mapping(piece) and piece.get("type") in _TEXTS for piece in pieces)
    return Message(message["role"], parts, segment, fields, typed)


def texts_within(value: object, owner: str, depth: int = 0) -> Iterator[str]:
    """All texts of plain data, names of fields included.

    Args:
        owner: of the data, for error sentences.

    Raises:
        UserError: it is not plain data, or is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise UserError(f"{owner} is nested more than {MAX_DEPTH} deep; make it flatter.")
    if isinstance(value, str):
        yield value
    elif is_mapping(value):
        for name, inner in value.items():
            yield from texts_within([name, inner], owner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in cast(Sequence[object], value):
            yield from texts_within(inner, owner, depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise UserError(f"{owner} holds a {type(value).__name__}; give texts, numbers, lists and mappings.")


def _part(index: int, piece: object) -> Part:
    if isinstance(piece, str):
        return Part(piece)
    kind = piece.get("type", "text") if is_mapping(piece) else None
    if is_text(kind) and kind not in _TEXTS:
        raise UserError(f"Message {index} has a part of type {kind[:40]!r}; kvprobe reads text, so leave it out.")
    if not is_mapping(piece) or not isinstance(piece.get("text"), str):
        raise UserError(f"Message {index} has a part without text; give texts or {{'text': …, 'name': …}}.")
    if others := sorted(str(field) for field in set(piece) - {"type", "text", "name", *_BESIDE}):
        raise UserError(f"Message {index} has a part with the field {others[0]!r}, which is not read; leave it out.")
    name = piece.get("name")
    if name is not None and not isinstance(name, str):
        raise UserError(f"Message {index} has a part called {str(name)[:40]!r}; a name must be a text.")
    return Part(piece["text"], name)
