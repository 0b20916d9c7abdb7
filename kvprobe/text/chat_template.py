"""A conversation as its chat template writes it, in pieces whose segment is known.

The template is rendered once with a placeholder in place of each message, which separates the delimiters from the
messages' text. The place of every character is therefore known before tokenisation, and no text is ever searched.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jinja2 import TemplateError, TemplateRuntimeError

from kvprobe.errors import UserError
from kvprobe.names import one_line
from kvprobe.text.messages import Message
from kvprobe.text.tokens import ANSWER_HEADER

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

    @property
    def chat_template(self) -> object: ...
    @property
    def all_special_tokens(self) -> Sequence[str]: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        /,
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        chat_template: str | None,
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


def lay_out(messages: Sequence[Message], tokenizer: Tokenizer, generation_prompt: bool) -> list[Piece]:
    """The pieces of the rendered conversation, in order.

    Raises:
        UserError: the tokenizer is slow, the template refuses or rewrites messages, or a message has a control token.
    """
    if not getattr(tokenizer, "is_fast", True):
        raise UserError("Segments need a fast tokenizer, which knows the place of each token in the text.")
    _refuse_control_tokens(messages, tokenizer)
    if generation_prompt and any(message.segment == ANSWER_HEADER for message in messages):
        raise UserError(
            f"A segment is called {ANSWER_HEADER!r}, as the header of the answer is; give the segment another name."
        )
    template = None if tokenizer.chat_template else PLAIN_CHAT_TEMPLATE

    def render(conversation: list[dict[str, str]], generation_prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=generation_prompt, chat_template=template
            )
        except TemplateError:
            raise
        except Exception as error:  # what a template computes can fail in any way
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

    try:
        return _pieces(messages, render, generation_prompt)
    except TemplateError as error:
        raise UserError(
            f"The chat template refuses the conversation ({one_line(error)}); use roles that it knows, "
            f"in the order that it expects (often user and assistant in turn, no system)."
        ) from error


def _refuse_control_tokens(messages: Sequence[Message], tokenizer: Tokenizer) -> None:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    control = dict.fromkeys([*tokenizer.all_special_tokens, *(token.content for token in added if token.special)])
    for index, message in enumerate(messages):
        for token in control:
            if token in message.text or token in message.role:
                raise UserError(
                    f"Message {index} ({message.segment!r}) contains the control token {token!r}, which would "
                    f"end or forge a message; remove it from the text."
                )


def _pieces(messages: Sequence[Message], render: Render, generation_prompt: bool) -> list[Piece]:
    skeleton = [{"role": message.role, "content": _PLACEHOLDER.format(index)} for index, message in enumerate(messages)]
    literals = _split_at_placeholders(render(skeleton), len(skeleton))
    with_header = _split_at_placeholders(render(skeleton, generation_prompt), len(skeleton))
    if not with_header[-1].startswith(literals[-1]):
        raise UserError(
            "The chat template changes the conversation when it adds a generation prompt; use a template that only "
            "appends."
        )

    pieces: list[Piece] = []
    header = literals[0]
    for index, message in enumerate(messages):
        between = literals[index + 1]
        last = index + 1 == len(messages)
        trailer = between if last else _trailer(render, skeleton[: index + 1], between)
        pieces.append(Piece(header, message.segment))
        pieces += [Piece(part.text, message.segment, part.name, delimiter=False) for part in message.parts]
        pieces.append(Piece(trailer, message.segment))
        header = between[len(trailer) :]
    pieces.append(Piece(with_header[-1][len(literals[-1]) :], ANSWER_HEADER))

    direct = render([{"role": message.role, "content": message.text} for message in messages], generation_prompt)
    if "".join(piece.text for piece in pieces) != direct:
        raise UserError(
            "The chat template rewrites the text of messages (it trims or reads them), so their place "
            "cannot be known; strip leading and trailing spaces from each message, or use another template."
        )
    return pieces


def _split_at_placeholders(rendered: str, count: int) -> list[str]:
    """What the template writes before, between and after `count` messages."""
    literals: list[str] = []
    rest = rendered
    for index in range(count):
        literal, placeholder, rest = rest.partition(_PLACEHOLDER.format(index))
        if not placeholder:
            raise UserError(
                f"The chat template drops or reorders message {index}, so segments cannot be placed; "
                f"use roles that it knows, in the order that it expects (user and assistant in turn)."
            )
        literals.append(literal)
    return [*literals, rest]


def _trailer(render: Render, so_far: list[dict[str, str]], between: str) -> str:
    """The part of the text `between` two messages that still belongs to the first: what the template writes
    after it when it is the last message. A template that cannot end there gives all of it to the first."""
    try:
        *_, after = _split_at_placeholders(render(so_far), len(so_far))
    except (TemplateError, UserError):
        return between
    return after if between.startswith(after) else between
