"""Replies to questions, written under one cache and read again after others."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvprobe.cache.cache import KVCache
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.text.tokens import GENERATED, Tokens


@dataclass(frozen=True)
class GivenReply:
    """A question, the user's next message, and the tokens that were answered."""

    question: str
    ids: tuple[int, ...]


def replies_to(model: Model, cache: KVCache, questions: Sequence[str], count: int) -> tuple[GivenReply, ...]:
    """The likeliest replies of so many tokens after a cache of one row."""
    asked = [model.prompts(cache, question)[0] for question in questions]
    replies = generate(model.lanes, asked, cache.fork(len(asked)), max_new_tokens=count, stop=()).tokens
    return tuple(GivenReply(question, tuple(ids)) for question, ids in zip(questions, replies, strict=True))


def read_with(model: Model, cache: KVCache, replies: Sequence[GivenReply]) -> list[Tokens]:
    """Each question after a cache and its reply, whose last token is only predicted."""
    rows: list[Tokens] = []
    for reply in replies:
        prompt = model.prompts(cache, reply.question)[0]
        rows.append(prompt + Tokens.of(reply.ids[:-1], GENERATED, prompt.following))
    return rows
