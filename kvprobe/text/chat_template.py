"""A conversation as its chat template writes it, in pieces whose segment is known.

The template is rendered once with a placeholder in place of each message, which separates the delimiters from the
messages' text. The place of every character is therefore known before tokenisation, and no text is ever searched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jinja2 import TemplateError, TemplateRuntimeError

from kvprobe.errors import UserError
from kvprobe.names import one_line
from kvprobe.text.headers import Headers, Render, placeholders, split_at_placeholders
from kvprobe.text.messages import Message
from kvprobe.text.tokens import ANSWER_HEADER, PREAMBLE

PLAIN_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)
"""For base models, whose tokenizer has no chat template of its own."""


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
        **variables: str,
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

    def render(conversation: list[dict[str, str]], generation_prompt: bool = False, **variables: str) -> str:
        try:
            return tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                chat_template=template,
                **variables,
            )
        except TemplateError:
            raise
        except Exception as error:  # what a template computes can fail in any way
            raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

    try:
        return _pieces(messages, render, generation_prompt, getattr(tokenizer, "bos_token", None))
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


def _pieces(
    messages: Sequence[Message], render: Render, generation_prompt: bool, start_token: str | None
) -> list[Piece]:
    skeleton = placeholders([message.role for message in messages])
    literals = split_at_placeholders(render(skeleton), len(skeleton))
    with_header = split_at_placeholders(render(skeleton, generation_prompt), len(skeleton))
    if not with_header[-1].startswith(literals[-1]):
        raise UserError(
            "The chat template changes the conversation when it adds a generation prompt; use a template that only "
            "appends."
        )

    headers = Headers(render, start_token)
    preamble, folded_into, header = headers.opening([message.role for message in messages], *literals[:2])
    user = next((message.segment for message in messages if message.role == "user"), "")
    pieces = [Piece(preamble, PREAMBLE), Piece(folded_into, user)]
    for index, message in enumerate(messages):
        between = literals[index + 1]
        following = messages[index + 1 : index + 2]
        trailer = headers.trailer(skeleton[: index + 1], between, following[0].role) if following else between
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
