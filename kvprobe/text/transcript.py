"""Conversations with named segments, and their tokens.

A transcript is turned into tokens by the model's own chat template. Spans are found by construction: the
template is rendered once with a placeholder in place of each message, which tells the delimiters apart from
the text, so the place of every character is known before anything is tokenised. No text is ever searched.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from jinja2 import TemplateError, TemplateRuntimeError

from kvprobe.errors import UserError
from kvprobe.names import unknown

PositionMode = Literal["gapped", "contiguous"]

PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For base models, whose tokenizer has no chat template of its own."""

Render = Callable[..., str]
"""Messages, and whether to add a generation prompt, to text."""

_PLACEHOLDER = "\ue000{}\ue001"  # private-use characters: no template contains or alters them


@runtime_checkable
class Tokenizer(Protocol):
    """What a transcript needs of a (fast) Hugging Face tokenizer."""

    chat_template: Any
    all_special_tokens: Any

    def apply_chat_template(self, conversation: Any, /, **kwargs: Any) -> Any: ...
    def __call__(self, text: Any, /, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Part:
    """A piece of a message's text; a named part can be found again among the tokens."""

    text: str
    name: str | None = None


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant`, or what else the chat template knows.
        parts: the text, in order.
        segment: name of the segment that the message (with its delimiters) belongs to.
    """

    role: str
    parts: tuple[Part, ...]
    segment: str

    def __post_init__(self) -> None:
        # Anything longer could forge the header of another message in a template of plain words.
        if not isinstance(self.role, str) or not re.fullmatch(r"[\w-]+", self.role):
            raise UserError(f"A message has the role {str(self.role)[:40]!r}; a role is one word, such as 'user'.")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Tokens:
    """A run of tokens with what the ledger needs to know of each.

    Attributes:
        ids: vocabulary ids.
        positions: logical index of each token.
        segments: segment name of each token.
        parts: name of the message part that the token belongs to, or None.
        recomputed: true from the first token that stands after text that was left out.
        delimiters: true for tokens of the chat template that are not a message's text.
        end: the position of what comes next, where hidden text at the end keeps its place; None for right after.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    segments: tuple[str, ...]
    parts: tuple[str | None, ...] = field(repr=False)
    recomputed: tuple[bool, ...] = field(repr=False)
    delimiters: tuple[bool, ...] = field(repr=False)
    end: int | None = None

    @classmethod
    def of(cls, ids: Sequence[int], segment: str = "prompt", start: int = 0) -> "Tokens":
        """Plain token ids as one segment, at consecutive positions from `start`.

        Raises:
            UserError: an id or the start is no whole number, or is below zero.
        """
        count, whole = len(ids), _whole_numbers([start, *ids])
        start = whole[0]
        return cls(
            whole[1:],
            tuple(range(start, start + count)),
            (segment,) * count,
            (None,) * count,
            (False,) * count,
            (False,) * count,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: slice) -> "Tokens":
        return Tokens(
            self.ids[where],
            self.positions[where],
            self.segments[where],
            self.parts[where],
            self.recomputed[where],
            self.delimiters[where],
            self.end if where.indices(len(self))[1] == len(self) else None,
        )

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            self.ids + other.ids,
            self.positions + other.positions,
            self.segments + other.segments,
            self.parts + other.parts,
            self.recomputed + other.recomputed,
            self.delimiters + other.delimiters,
            other.end,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Segment names in order of first appearance."""
        return tuple(dict.fromkeys(self.segments))

    @property
    def following(self) -> int:
        """The position of the token that comes next."""
        return self.positions[-1] + 1 if self.end is None else self.end

    def span(self, segment: str) -> slice:
        """Where a segment stands; an unknown or interrupted segment is refused."""
        return _span(self.segments, "segment", segment)

    def part(self, name: str) -> slice:
        """Where a named part of a message stands; an unknown or interrupted part is refused."""
        return _span(self.parts, "part", name)

    def shifted(self, start: int) -> "Tokens":
        """The same tokens with the first one at position `start`."""
        shift = start - self.positions[0] if self.positions else 0
        end = None if self.end is None else self.end + shift
        return replace(self, positions=tuple(position + shift for position in self.positions), end=end)


@dataclass(frozen=True)
class Transcript:
    """A conversation whose messages belong to named segments.

    Attributes:
        messages: in order.
        hidden: segments that are left out of the tokens (see `without`).
        mode: where the tokens after a hidden segment stand: `gapped` keeps the positions that they would have
            had, `contiguous` closes the gap.
    """

    messages: tuple[Message, ...]
    hidden: frozenset[str] = frozenset()
    mode: PositionMode = "gapped"

    @classmethod
    def from_messages(cls, messages: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None) -> "Transcript":
        """A transcript of `{"role": …, "content": …}` messages.

        `content` is a text, or a list of texts and `{"text": …, "name": …}` parts. `names` gives the segment
        of each message; neighbours may share one. Without names each message is its own segment, `m0`, `m1` ….

        Raises:
            UserError: no message, one without role or content, with a role that is not one word, with other fields, or empty; or
                not as many names as messages.
        """
        messages = list(messages)
        names = [f"m{index}" for index in range(len(messages))] if names is None else list(names)
        if len(names) != len(messages):
            raise UserError(f"There are {len(messages)} messages but {len(names)} segment names.")
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise UserError(f"A segment is called {str(wrong[0])[:40]!r}; a name is a text.")
        if not messages:
            raise UserError("A conversation has at least one message; give {'role': …, 'content': …}.")
        built = [
            _message(index, message, name) for index, (message, name) in enumerate(zip(messages, names, strict=True))
        ]
        runs = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
        if len(set(runs)) != len(runs):
            raise UserError(f"Segment names must not come back after another segment: {', '.join(map(repr, runs))}.")
        return cls(tuple(built))

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Segment names in order, hidden ones included."""
        return tuple(dict.fromkeys(message.segment for message in self.messages))

    def without(self, *segments: str, mode: PositionMode = "gapped") -> "Transcript":
        """The conversation as if these segments had never been said: prefill it to restart.

        `gapped` (the default) leaves the other tokens where they were, so that the cache differs from a masked
        one in provenance alone; `contiguous` closes the gap, as an engine does that rebuilds a cache.
        """
        for name in segments:
            if name not in self.segments:
                raise UserError(unknown("segment", name, self.segments))
        if mode not in get_args(PositionMode):
            raise UserError(unknown("position mode", mode, get_args(PositionMode)))
        return replace(self, hidden=self.hidden | set(segments), mode=mode)

    def tokens(self, tokenizer: Tokenizer, generation_prompt: bool = False) -> Tokens:
        """The tokens of the conversation by the tokenizer's chat template.

        With nothing hidden, the ids are those of `apply_chat_template`. `generation_prompt` adds the header of
        the assistant's next message as a segment called `generation`.

        Raises:
            UserError: the tokenizer is slow, the template rewrites messages, or a message contains one of the
                tokenizer's control tokens.
        """
        text, pieces = self._layout(tokenizer, generation_prompt)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        segments, parts, delimiters = [], [], []
        piece = 0
        for _, end in offsets:
            # A token belongs to the piece that holds its last character: " 4" at a border is part of "4".
            while end > pieces[piece].end:
                piece += 1
            segments.append(pieces[piece].segment)
            parts.append(pieces[piece].part)
            delimiters.append(pieces[piece].delimiter)
        count = len(ids)
        every = Tokens(
            tuple(ids), tuple(range(count)), tuple(segments), tuple(parts), (False,) * count, tuple(delimiters)
        )
        return self._drop_hidden(every)

    def _drop_hidden(self, every: Tokens) -> Tokens:
        if not self.hidden:
            return every
        kept = [index for index, segment in enumerate(every.segments) if segment not in self.hidden]
        first_hidden = next(index for index, segment in enumerate(every.segments) if segment in self.hidden)
        return Tokens(
            ids=tuple(every.ids[index] for index in kept),
            positions=tuple(kept) if self.mode == "gapped" else tuple(range(len(kept))),
            segments=tuple(every.segments[index] for index in kept),
            parts=tuple(every.parts[index] for index in kept),
            recomputed=tuple(index > first_hidden for index in kept),
            delimiters=tuple(every.delimiters[index] for index in kept),
            end=len(every) if self.mode == "gapped" else None,
        )

    def _layout(self, tokenizer: Tokenizer, generation_prompt: bool) -> "tuple[str, list[_Piece]]":
        """The rendered text and the pieces that it consists of, in order."""
        if not getattr(tokenizer, "is_fast", True):
            raise UserError("Segments need a fast tokenizer, which knows the place of each token in the text.")
        self._refuse_control_tokens(tokenizer)
        if generation_prompt and "generation" in self.segments:
            raise UserError("A segment is called 'generation', as the header of the answer is; give it another name.")
        template = None if tokenizer.chat_template else PLAIN_CHAT_TEMPLATE

        def render(messages: list[dict[str, str]], generation_prompt: bool = False) -> str:
            try:
                return tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    chat_template=template,
                )
            except TemplateError:
                raise
            except Exception as error:  # what a template computes can fail in any way
                raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

        try:
            return self._place(render, generation_prompt)
        except TemplateError as error:
            raise UserError(
                f"The chat template refuses the conversation ({' '.join(str(error).split())[:200]}); use roles that it knows, in the order that it "
                f"expects (often user and assistant in turn, no system)."
            ) from error

    def _place(self, render: Render, generation_prompt: bool) -> "tuple[str, list[_Piece]]":

        skeleton = [
            {"role": message.role, "content": _PLACEHOLDER.format(index)} for index, message in enumerate(self.messages)
        ]
        literals = _split_at_placeholders(render(skeleton), len(skeleton))
        with_header = _split_at_placeholders(render(skeleton, generation_prompt), len(skeleton))
        if not with_header[-1].startswith(literals[-1]):
            raise UserError("The chat template changes the conversation when it adds a generation prompt.")

        pieces: list[_Piece] = []
        header = literals[0]
        for index, message in enumerate(self.messages):
            between = literals[index + 1]
            last = index + 1 == len(self.messages)
            trailer = between if last else _trailer(render, skeleton[: index + 1], between)
            pieces.append(_Piece(header, message.segment, None))
            pieces += [_Piece(part.text, message.segment, part.name, delimiter=False) for part in message.parts]
            pieces.append(_Piece(trailer, message.segment, None))
            header = between[len(trailer) :]
        pieces.append(_Piece(with_header[-1][len(literals[-1]) :], "generation", None))

        text = "".join(piece.text for piece in pieces)
        direct = render(
            [{"role": message.role, "content": message.text} for message in self.messages], generation_prompt
        )
        if text != direct:
            raise UserError(
                "The chat template rewrites the text of messages (it trims or reads them), so their place "
                "cannot be known; strip leading and trailing spaces from each message, or use another template."
            )
        end = 0
        for piece in pieces:
            end += len(piece.text)
            piece.end = end
        return text, pieces

    def _refuse_control_tokens(self, tokenizer: Tokenizer) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        control = dict.fromkeys([*tokenizer.all_special_tokens, *(token.content for token in added if token.special)])
        for index, message in enumerate(self.messages):
            for token in control:
                if token in message.text or token in message.role:
                    raise UserError(
                        f"Message {index} ({message.segment!r}) contains the control token {token!r}, which would "
                        f"end or forge a message; remove it from the text."
                    )


@dataclass
class _Piece:
    """A stretch of rendered text, the segment it belongs to, and where it ends."""

    text: str
    segment: str
    part: str | None
    end: int = 0
    delimiter: bool = True


def _message(index: int, message: Mapping[str, Any], name: str) -> Message:
    """A message from its mapping, in the segment `name`."""
    if not isinstance(message, Mapping):
        raise UserError(f"Message {index} is a {type(message).__name__}; give {{'role': …, 'content': …}}.")
    missing = {"role", "content"} - set(message)
    if missing:
        raise UserError(f"Message {index} has no {' and no '.join(sorted(missing))}.")
    if others := sorted(str(field) for field in set(message) - {"role", "content"}):
        raise UserError(f"Message {index} has the field {others[0]!r}, which is not read; write it into the content.")
    role, content = message["role"], message["content"]
    pieces = [content] if isinstance(content, str) else content
    if not isinstance(pieces, Sequence):
        raise UserError(f"Message {index} has a {type(content).__name__} for content; give a text, or a list of texts.")
    parts = tuple(_part(index, piece) for piece in pieces)
    if not "".join(part.text for part in parts).strip():
        raise UserError(f"Message {index} ({name!r}) is empty; a segment needs at least one token.")
    return Message(role, parts, name)


def _part(index: int, piece: Any) -> Part:
    if isinstance(piece, str):
        return Part(piece)
    if not isinstance(piece, Mapping) or not isinstance(piece.get("text"), str) or piece.get("type", "text") != "text":
        raise UserError(f"Message {index} has a part without text; give texts or {{'text': …, 'name': …}}.")
    if others := sorted(str(field) for field in set(piece) - {"type", "text", "name"}):
        raise UserError(f"Message {index} has a part with the field {others[0]!r}, which is not read; leave it out.")
    name = piece.get("name")
    if name is not None and not isinstance(name, str):
        raise UserError(f"Message {index} has a part called {str(name)[:40]!r}; a name is a text.")
    return Part(piece["text"], name)


def _whole_numbers(numbers: Sequence[Any]) -> tuple[int, ...]:
    """The numbers as Python's own; what is no whole number from 0 on is refused, `True` and `3.0` too."""

    def whole(number: Any) -> int:
        try:
            found = -1 if isinstance(number, bool) else operator.index(number)
        except TypeError:
            found = -1
        if found < 0:
            raise UserError(f"{str(number)[:40]!r} is no token id or position; give whole numbers from 0 on.")
        return found

    return tuple(map(whole, numbers))


def _split_at_placeholders(rendered: str, count: int) -> list[str]:
    """What the template writes before, between and after `count` messages."""
    literals, rest = [], rendered
    for index in range(count):
        literal, found, rest = rest.partition(_PLACEHOLDER.format(index))
        if not found:
            raise UserError(
                f"The chat template drops or reorders message {index}; segments cannot be placed. "
                f"Use roles that it knows, in the order that it expects (user and assistant in turn)."
            )
        literals.append(literal)
    return [*literals, rest]


def _trailer(render: Render, so_far: list[dict[str, str]], between: str) -> str:
    """The part of the text `between` two messages that still belongs to the first: what the template writes
    after it when it is the last message. A template that cannot end there gives all of it to the first."""
    try:
        *_, after = _split_at_placeholders(render(so_far), len(so_far))
    except (TemplateError, ValueError):
        return between
    return after if between.startswith(after) else between


def _span(names: Sequence[str | None], kind: str, name: str) -> slice:
    places = [index for index, found in enumerate(names) if found == name]
    if not places:
        raise UserError(unknown(kind, name, dict.fromkeys(found for found in names if found is not None)))
    if any(after != before + 1 for before, after in pairwise(places)):
        raise UserError(f"The {kind} {name!r} stands in more than one place.")
    return slice(places[0], places[-1] + 1)
