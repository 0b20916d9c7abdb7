"""What users give a model to read, as runs of tokens, one per row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard, cast

from kvprobe.checks import is_mapping
from kvprobe.errors import UserError
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

Messages = Mapping[str, object] | Sequence[Mapping[str, object]]
Readable = str | Transcript | Tokens | Messages | Sequence[str | Transcript | Tokens | Messages]
"""What a model reads: a text, a conversation (a transcript, or `{"role": …, "content": …}` messages), tokens, or a
batch of them."""


def rows_of(text: object, tokenizer: Callable[[], Tokenizer], answered: bool) -> list[Tokens]:
    """One run of tokens per row.

    Args:
        tokenizer: gives the tokenizer where one is needed, or refuses.
        answered: end conversations with the header of the answer.

    Raises:
        UserError: the text is nothing that can be read.
    """
    if isinstance(text, str):
        return [Tokens.of(tokenizer()(text)["input_ids"])]
    if isinstance(text, Tokens):
        return [text]
    if isinstance(text, Transcript):
        return [text.tokens(tokenizer(), generation_prompt=answered)]
    kind = type(text).__name__
    pieces: list[object] | None = [text] if is_mapping(text) else [*text] if isinstance(text, Sequence) else None
    if pieces and all(isinstance(piece, Mapping) for piece in pieces):
        chat = Transcript.from_messages(cast(list[Mapping[str, object]], pieces))
        return rows_of(chat, tokenizer, answered)
    if pieces is None or any(isinstance(piece, Mapping | int | float | bytes) for piece in pieces):
        raise UserError(
            f"A {kind} of this kind cannot be read; give a text, messages, a Transcript, Tokens "
            "(Tokens.of(ids)), or a list of such rows."
        )
    return [row for piece in pieces for row in rows_of(piece, tokenizer, answered)]


def are_texts(text: object) -> TypeGuard[str | Sequence[str]]:
    """Whether it is a bare text, or a list of them."""
    if isinstance(text, str):
        return True
    rows = cast(Sequence[object], text) if isinstance(text, list | tuple) else ()
    return bool(rows) and all(isinstance(row, str) for row in rows)


def texts_after(text: str | Sequence[str], following: Sequence[int], tokenizer: Tokenizer) -> list[Tokens]:
    """Bare texts as they follow a cache: one text after every row, or one for each, or all after a single row.

    Args:
        following: the position that comes next, of each row of the cache.

    Raises:
        UserError: there is not one text for each row.
    """
    texts = [text] * len(following) if isinstance(text, str) else text
    following = [*following] * len(texts) if len(following) == 1 else following
    if len(texts) != len(following):
        raise UserError(f"{len(texts)} texts follow a cache of {len(following)} rows; give one text for each row.")
    return [
        Tokens.of(tokenizer(row, add_special_tokens=False)["input_ids"], "text", position)
        for row, position in zip(texts, following, strict=True)
    ]


def user_turn(text: str, tokenizer: Tokenizer, arguments: Mapping[str, object] | None = None) -> tuple[Tokens, Tokens]:
    """The tokens that close an assistant's message, and a user's message with the header of the answer to it.

    Args:
        arguments: of the chat template.
    """
    exchange = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": [{"text": "-", "name": "answer"}]},
        {"role": "user", "content": text},
    ]
    chat = Transcript.from_messages(exchange, names=["before", "before", "question"])
    chat = replace(chat, arguments={**(arguments or {}), "continue_final_message": False})
    tokens = chat.tokens(tokenizer, generation_prompt=True)
    start = tokens.span("before").stop
    return tokens[tokens.part("answer").stop : start], tokens[start:]
