"""A conversation as its chat template writes it, in pieces whose segment is known.

The text is what the template writes, character for character; `marks` and `headers` say whose each character is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, cast, runtime_checkable

from jinja2 import TemplateError, TemplateRuntimeError

from kvprobe.errors import UserError
from kvprobe.names import one_line
from kvprobe.text.headers import FOLDED, Headers
from kvprobe.text.marks import Marks
from kvprobe.text.messages import REASONING, Message, texts_within
from kvprobe.text.template_source import TemplateSource, template_source
from kvprobe.text.tokens import ANSWER_HEADER, PREAMBLE

PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For base models, whose tokenizer has no chat template of its own."""

OF_TOKENS = frozenset(
    {"conversation", "messages", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"tokenizer_kwargs", "return_assistant_tokens_mask", "sanitize_control_tokens"}
)
"""Arguments of `apply_chat_template` that do not change the text."""
METADATA = frozenset(
    {"id", "name", "tool_call_id", "weight", "timestamp", "created", "created_at", "create_time", "model", "metadata"}
)
"""Fields that name or date a message, and that a template may ignore."""

_THOUGHTS = re.compile(r"\s*[<\[][^\s>\]]*(think|thought|reason|channel|analysis)", re.IGNORECASE)
"""The tag that thoughts begin with, in all chat templates that have any."""


@runtime_checkable
class Tokenizer(Protocol):
    """What a transcript needs of a (fast) Hugging Face tokenizer."""

    @property
    def chat_template(self) -> object: ...
    @property
    def all_special_tokens(self) -> Sequence[str]: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        /,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        chat_template: str | None,
        **arguments: Any,
    ) -> str: ...
    def __call__(
        self, text: str, /, *, add_special_tokens: bool = ..., return_offsets_mapping: bool = ...
    ) -> Mapping[str, list[Any]]: ...


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text: a delimiter, or a part of a message.

    Attributes:
        segment: that the text belongs to.
        part: name of the message part; None without a name, and for delimiters.
        delimiter: whether the template wrote it.
    """

    text: str
    segment: str
    part: str | None = None
    delimiter: bool = True


@dataclass(frozen=True)
class Layout:
    """A rendered conversation.

    Attributes:
        pieces: in order; their texts joined are what the template writes.
        dropped: thoughts that the template left out, by segment.
    """

    pieces: list[Piece]
    dropped: Mapping[str, str]


def template_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that are given; None is not.

    Raises:
        UserError: one does not change the text, or is not plain data; or two contradict each other.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if wrong := [name for name in given if name in OF_TOKENS]:
        raise UserError(
            f"{wrong[0]!r} is no argument of a chat template but of what is done with its text; leave it out."
        )
    if given.get("add_generation_prompt") and given.get("continue_final_message"):
        raise UserError(
            "add_generation_prompt begins a new answer and continue_final_message goes on; give one of them."
        )
    if not isinstance(tools := given.get("tools", []), list | tuple):
        raise UserError(f"tools is a {type(tools).__name__}; give a list of tools.")
    for name, value in _plain(given).items():
        _ = [*texts_within(value, f"The argument {name!r}")]
    return given


def _plain(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments that are data; tools may be functions, whose signature the library reads."""
    tools = cast(Sequence[object], arguments.get("tools", []))
    return {**arguments, "tools": [tool for tool in tools if not callable(tool)]}


def lay_out(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    generation_prompt: bool,
    arguments: Mapping[str, object] | None = None,
) -> Layout:
    """The rendered conversation in pieces.

    Raises:
        UserError: the tokenizer is slow; the template refuses messages, rewrites them or leaves out more than thoughts,
            or does not read an argument or a field; or a message has a control token.
    """
    if not getattr(tokenizer, "is_fast", True):
        raise UserError("Segments need a fast tokenizer, which knows the place of each token in the text.")
    if generation_prompt and any(message.segment == ANSWER_HEADER for message in messages):
        raise UserError(
            f"A segment is called {ANSWER_HEADER!r}, as the header of the answer is; give the segment another name."
        )
    try:
        return _Rendering(messages, tokenizer, dict(arguments or {}), generation_prompt).layout()
    except TemplateError as error:
        raise UserError(
            f"The chat template refuses the conversation ({one_line(error)}); use roles that it knows, "
            f"in the order that it expects (often user and assistant in turn, no system)."
        ) from error


class _Rendering:
    """One conversation, one template and its arguments."""

    def __init__(
        self, messages: Sequence[Message], tokenizer: Tokenizer, arguments: dict[str, Any], generation_prompt: bool
    ) -> None:
        self.messages, self.tokenizer = messages, tokenizer
        self.template: str | None = arguments.pop("chat_template", None)
        if self.template is None and not tokenizer.chat_template:
            self.template = PLAIN_CHAT_TEMPLATE
        self.continued = arguments.pop("continue_final_message", False)
        self.answered = arguments.pop("add_generation_prompt", False) or generation_prompt
        self.arguments = arguments
        source = self.template or tokenizer.chat_template
        if isinstance(tokenizer.chat_template, Mapping):  # several by name, of which one may be for tools
            try:
                source = cast(Any, tokenizer).get_chat_template(self.template, arguments.get("tools"))
            except ValueError as error:
                raise TemplateRuntimeError(str(error)) from error
        self.source = template_source(str(source))
        _refuse_unread(messages, arguments, self.source)
        _refuse_control_tokens(messages, arguments, tokenizer)

    def beginning(self, messages: Sequence[Mapping[str, object]], **variables: str) -> str:
        """Messages as the template writes them, without the header of an answer."""
        return self._render(messages, add_generation_prompt=False, **variables)

    def whole(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The whole conversation up to the answer, where one is asked for."""
        if self.continued:
            return self._render(messages, add_generation_prompt=False, continue_final_message=self.continued)
        return self._render(messages, add_generation_prompt=bool(self.answered))

    def _render(self, messages: Sequence[Mapping[str, object]], **how: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=self.template, **{**self.arguments, **how}
            )
        except TemplateError:
            raise
        except Exception as error:  # what a template computes can fail in any way
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

    def layout(self) -> Layout:
        if any(message.typed for message in self.messages):
            try:
                return self._laid_out(typed=True)
            except (TemplateError, UserError):
                pass  # a template that takes plain texts
        return self._laid_out(typed=False)

    def _laid_out(self, typed: bool) -> Layout:
        given = [message.given(typed) for message in self.messages]
        rendered = self.whole(given)
        marks = Marks(given, self.source.sought, rendered)
        bare = [
            {**message, "content": text.strip()} if isinstance(text := message.get("content"), str) else message
            for message in given
        ]
        trimmed = bare != given and self.whole(bare) == rendered
        as_python = typed and any(repr(message.get("content")) in rendered for message in given)
        if as_python or not marks.place(rendered, self.whole(marks.messages), trimmed):
            raise UserError(
                "The chat template rewrites the text of messages, or tears one apart, so the places of segments cannot "
                "be known; use another template."
            )
        dropped = self._dropped(marks)
        return Layout(self._pieces(rendered, marks), dropped)

    def _dropped(self, marks: Marks) -> dict[str, str]:
        """The thoughts that are not written, by segment; anything else that is missing is refused."""
        thoughts: dict[str, str] = {}
        for text in marks.texts:
            if not (dropped := text.dropped):
                continue
            message = self.messages[text.message]
            tagged = message.role == "assistant" and _THOUGHTS.match(dropped)
            if text.source not in REASONING and not (text.source == "content" and tagged):
                advice = "leave this out, or use roles and a template that keep it"
                if message.role in FOLDED and self._written_later(dropped):
                    advice = "give a Transcript and the user's next message, with which it is, to generate or compare"
                raise UserError(
                    f"The chat template drops or reorders message {text.message}, since {dropped.strip()[:40]!r} of "
                    f"its {text.source!r} is not written; {advice}."
                )
            thoughts[message.segment] = thoughts.get(message.segment, "") + dropped
        return thoughts

    def _written_later(self, text: str) -> bool:
        """Whether the text is written once a user's message follows."""
        try:
            messages = [message.given(typed=False) for message in self.messages]
            return text.strip() in self.beginning([*messages, {"role": "user", "content": "-"}])
        except TemplateError:
            return False

    def _pieces(self, rendered: str, marks: Marks) -> list[Piece]:
        segments = [message.segment for message in self.messages]
        names: list[str] = []  # of the segment of each character
        for owner, written in self._written(rendered, marks):
            names += [owner if isinstance(owner, str) else segments[owner]] * len(written)
        if missing := set(segments) - set(names):
            raise UserError(f"The chat template writes nothing for {min(missing)!r}; leave its messages out.")
        whose: list[tuple[str, str | None, bool]] = [(name, None, True) for name in names]
        for text in marks.texts:
            message = self.messages[text.message]
            parts = message.parts if text.item is None else [message.parts[text.item]]
            named = [part.name for part in parts for _ in part.text] if text.source == "content" else []
            for place, offset in text.places.items():
                whose[place] = (message.segment, named[offset] if named else None, False)
        runs = groupby(zip(whose, rendered, strict=True), lambda one: one[0])
        return [Piece("".join(letter for _, letter in run), *owner) for owner, run in runs]

    def _written(self, rendered: str, marks: Marks) -> Iterator[tuple[int | str, str]]:
        """The rendered text in stretches, each with its message, or the name of a segment that no message owns."""
        if not (spans := marks.spans()):
            raise UserError("The chat template writes nothing of these messages; use roles that it knows.")
        borders = Headers(
            marks.messages,
            [
                "".join(text.mark for text in marks.texts if text.message == index)
                for index in range(len(self.messages))
            ],
            self.beginning,
            getattr(self.tokenizer, "bos_token", None) or "",
        )
        past = 0
        for number, (message, span) in enumerate(spans):
            before = rendered[past : span.start]
            reader = next((other for other, _ in spans[number:] if self.messages[other].role not in FOLDED), message)
            shared = borders.folded(message, reader, before) if reader != message else 0
            reader = reader if shared else message
            own = before[shared:] if shared else ""
            before = before[:shared] if shared else before
            if not number:
                preamble, header = borders.opening(reader, before)
                yield from ((PREAMBLE, preamble), (reader, header))
            else:
                yield from borders.between(spans[number - 1][0], reader, before)
            yield from ((message, own), (message, rendered[span]))
            past = span.stop
        last = borders.between(spans[-1][0], None, rendered[past:])
        yield from last
        rest = rendered[past + sum(len(written) for _, written in last) :]
        yield (last[-1][0] if self.continued else ANSWER_HEADER), rest


def _refuse_unread(messages: Sequence[Message], arguments: Mapping[str, object], source: TemplateSource) -> None:
    for name in arguments:
        if name not in source.arguments:
            raise UserError(
                f"The chat template does not read the argument {name!r}; it reads "
                f"{', '.join(sorted(source.arguments)) or 'none'}; leave it out (delete the key, in a file), or use a "
                "model whose template reads it."
            )
    for index, message in enumerate(messages):
        for name, value in message.fields.items():
            if value and name not in (*METADATA, *REASONING) and name not in source.words:
                instead = "give it as 'tool_calls'" if name == "function_call" else "write it into the content"
                raise UserError(
                    f"Message {index} has the field {name!r}, which the chat template does not read; {instead}, "
                    f"leave it out, or use a template that reads it."
                )


def _refuse_control_tokens(messages: Sequence[Message], arguments: Mapping[str, object], tokenizer: Tokenizer) -> None:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    control = dict.fromkeys([*tokenizer.all_special_tokens, *(token.content for token in added if token.special)])
    given = {
        f"Message {index} ({message.segment!r})": [message.role, message.text, message.fields]
        for index, message in enumerate(messages)
    }
    given |= {f"The argument {name!r}": value for name, value in _plain(arguments).items()}
    for owner, value in given.items():
        text = "\0".join(texts_within(value, owner))
        for token in control:
            if token in text:
                raise UserError(
                    f"{owner} contains the control token {token!r}, which would end or forge a message; remove it from "
                    "the text."
                )
