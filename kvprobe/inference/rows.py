"""What users give a model to read, as runs of tokens, one per row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import numpy as np
from torch import Tensor

from kvprobe.cache.entries import entries
from kvprobe.cache.ledger import SINK_HIDDEN, Ledger
from kvprobe.checks import is_mapping, is_text, is_whole, whole_numbers
from kvprobe.errors import UserError, warn
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.messages import Message, Part
from kvprobe.text.tokens import ANSWER_HEADER, Tokens
from kvprobe.text.transcript import Transcript

Messages = Mapping[str, object] | Sequence[Mapping[str, object]]
Ids = Sequence[int] | Tensor | np.ndarray
_Row = str | Transcript | Tokens | Messages | Ids
Readable = Annotated[
    _Row | Sequence[_Row],
    "a text, messages, a Transcript, Tokens, ids (whole numbers in a list, an array or a tensor, as tokenizers give "
    "under 'input_ids'), or a list of such rows",
]
"""What a model reads: a text, a conversation (a transcript, or `{"role": …, "content": …}` messages), tokens, ids (a
list, an array or a tensor), or a batch of them."""


def turns_after(
    ledger: Ledger, ask: str | None, tokenizer: Tokenizer, arguments: Mapping[str, object] | None
) -> list[Tokens]:
    """A user's next message after each row of a cache, at the positions that follow it.

    Raises:
        UserError: there is no message.
    """
    if ask is None:
        raise UserError(
            "A cache alone cannot be continued, as it holds no logits; give `ask`, the user's next message."
        )
    closing, turn = user_turn(ask, tokenizer, arguments)
    unfinished, following = entries(ledger.unfinished, bool), entries(ledger.following, int)
    return [
        (closing + turn if open_answer else turn).shifted(position)
        for open_answer, position in zip(unfinished, following, strict=True)
    ]


def rows_of(text: object, tokenizer: Callable[[], Tokenizer], answered: bool) -> list[Tokens]:
    """One run of tokens per row.

    Args:
        tokenizer: gives the tokenizer where one is needed, or refuses.
        answered: end conversations with the header of the answer.

    Raises:
        UserError: the text is nothing that can be read.
    """
    if isinstance(text, str):
        return [Tokens.of(text_ids(tokenizer(), text))]
    if (ids := id_rows(text)) is not None:
        return [Tokens.of(row) for row in ids]
    if isinstance(text, Tokens):
        return [text]
    if isinstance(text, Transcript):
        tokens = text.tokens(tokenizer(), generation_prompt=answered)
        if any(tokens.recomputed[:1]):
            warn(SINK_HIDDEN)
        return [tokens]
    kind = type(text).__name__
    pieces: list[object] | None = [text] if is_mapping(text) else [*text] if isinstance(text, Sequence) else None
    if pieces and all(isinstance(piece, Mapping) for piece in pieces):
        chat = Transcript.from_messages(cast(list[Mapping[str, object]], pieces))
        return rows_of(chat, tokenizer, answered)
    if pieces is None or any(isinstance(piece, Mapping | int | float | bytes) for piece in pieces):
        raise UserError(
            f"A {kind} of this kind cannot be read; give a text, messages, a Transcript, Tokens, ids (whole "
            "numbers in a list, an array or a tensor, as tokenizers give under 'input_ids'), or a list of such rows."
        )
    return [row for piece in pieces for row in rows_of(piece, tokenizer, answered)]


def runs_after(text: object, following: Sequence[int], tokenizer: Callable[[], Tokenizer]) -> list[Tokens] | None:
    """Bare texts or ids as they follow a cache: one after every row, or one for each, or all after a single row; None
    for what has positions of its own.

    Args:
        following: the position that comes next, of each row of the cache.

    Raises:
        UserError: there is not one for each row.
    """
    rows = id_rows(text)
    if rows is None:
        texts = [text] if is_text(text) else cast(Sequence[object], text) if isinstance(text, list | tuple) else []
        if not texts or not all(map(is_text, texts)):
            return None
        rows = [text_ids(tokenizer(), row, within=True) for row in cast(Sequence[str], texts)]
    rows = rows * len(following) if len(rows) == 1 else rows
    following = [*following] * len(rows) if len(following) == 1 else following
    if len(rows) != len(following):
        raise UserError(f"{len(rows)} texts follow a cache of {len(following)} rows; give one text for each row.")
    return [Tokens.of(row, "text", position) for row, position in zip(rows, following, strict=True)]


def id_rows(given: Any) -> list[Sequence[int]] | None:
    """Token ids as rows, of a list, an array or a tensor with one or two axes; None for anything else."""
    listed: object = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple) or not listed:
        return None
    rows = cast(Sequence[object], listed)
    numbers = [whole_numbers(row) for row in ([rows] if is_whole(rows[0]) else rows)]
    return None if None in numbers else cast(list[Sequence[int]], numbers)


def text_ids(tokenizer: Tokenizer, text: str, *, within: bool = False) -> Sequence[int]:
    """The tokens of a text, after the tokenizer's own start token unless it stands `within` others; an end token that
    the tokenizer appends is left out, since the text is to be continued."""
    bare: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(text)["input_ids"]
    added = [before for before in range(len(whole) - len(bare) + 1) if whole[before : before + len(bare)] == bare]
    if not bare or not added:
        return bare if within else whole
    before = whole[: added[-1]]
    if before and bare[0] == before[-1]:
        place = (
            "which stands within what was read" if within else "and the tokenizer writes it too, so it is read twice"
        )
        warn(f"The text begins with the start token, {place}; take it out of the text.")
    return bare if within else before + bare


def needs_question(chat: Transcript, tokenizer: Tokenizer) -> bool:
    """Whether the template writes a conversation that ends in an answer as it stands before a user's next message only
    together with that message: a system message goes into the last user's turn, or the end is another header."""
    if chat.messages[-1].role != "assistant":
        return False
    try:
        return chat.tokens(tokenizer).segments[-1:] == (ANSWER_HEADER,)
    except UserError:
        return True


def with_question(chat: Transcript, text: str, tokenizer: Tokenizer, together: bool) -> tuple[Tokens, Tokens]:
    """The tokens of a conversation, and those of the user's next message with the header of the answer to it.

    Args:
        together: see `needs_question`.

    Raises:
        UserError: see `Transcript.tokens`.
    """
    if not together:
        tokens = chat.tokens(tokenizer)
        return tokens, user_turn(text, tokenizer, chat.arguments)[1].shifted(tokens.following)
    name = max(chat.segments, key=len) + "?" if "question" in chat.segments else "question"
    asked = replace(
        chat,
        messages=(*chat.messages, Message("user", (Part(text),), name)),
        arguments={**chat.arguments, "continue_final_message": False, "add_generation_prompt": False},
    )
    tokens = asked.tokens(tokenizer, generation_prompt=True)
    start = tokens.segments.index(name)
    return tokens[:start], tokens[start:]


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
