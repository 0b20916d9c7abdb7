"""Conversations that hold a random code in one turn, but not in its summary, and that ask for the code later.

Forty-eight hand-written contexts differ in topic, people, phrasing and length, so that no template repeats. Each
becomes a conversation of six segments: system, T1 (small talk), summary1, T2 (holds the code), summary2 (its text is
the same for every code), T3 (asks for the code). The protocol is that of the Goldberg/Papailiopoulos exchange on
masking prefixes and of arXiv 2604.09852.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain, islice
from typing import Protocol, runtime_checkable

import numpy as np

from kvprobe.errors import UserError
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.designs import Target
from kvprobe.tasks.exchanges import filled, talk
from kvprobe.text.transcript import Transcript

CODE_LENGTH = 5
SPARE = 64
"""Codes that are there to be exchanged for others; among so many, some begin with another digit."""
CODE = Target("code", tuple("0123456789"))
"""A code, as what its digits are."""


@dataclass(frozen=True)
class Context:
    """One hand-written conversation; `secret_user` holds `{code}` once, and no other text depends on the code."""

    id: str
    system: str
    chat_user: str
    chat_assistant: str
    ask_summary_1: str
    summary_1: str
    secret_user: str
    secret_assistant: str
    ask_summary_2: str
    summary_2: str
    question: str
    answer: str


@cache
def contexts() -> tuple[Context, ...]:
    """All contexts that ship with kvprobe."""
    entries = shipped_entries("tasks/passcode")
    return tuple(Context(**{field.name: entry[field.name] for field in fields(Context)}) for entry in entries)


def conversation(context: Context, code: str) -> Transcript:
    """The conversation of this context with this code: `code` is a part of T2, `answer` the same code in T3."""
    return talk(
        ("system", context.system),
        ("T1", context.chat_user, context.chat_assistant),
        ("summary1", context.ask_summary_1, context.summary_1),
        ("T2", filled(context.secret_user, "code", code, "code"), context.secret_assistant),
        ("summary2", context.ask_summary_2, context.summary_2),
        ("T3", context.question, [context.answer + " ", {"text": code, "name": "answer"}]),
    )


@runtime_checkable
class Encoder(Protocol):
    def __call__(self, text: str, /, *, add_special_tokens: bool) -> Mapping[str, list[int]]: ...


def draw_codes(count: int, rng: np.random.Generator, encode: Encoder) -> list[str]:
    """`count` different random codes, all of the same number of tokens, so that positions agree between them.

    Digits are independent and uniform, not balanced within a context: with balanced labels a probe that reads only the
    context would fall below chance. With a tokenizer that joins digits, only codes of the commonest token count are
    drawn.

    Raises:
        UserError: there are not so many different codes.
    """
    limit = 10**CODE_LENGTH // 2
    if count > limit:
        raise UserError(f"{count} codes were asked for; ask for at most {limit}.")
    drawn = (f"{number:0{CODE_LENGTH}d}" for number in rng.permutation(10**CODE_LENGTH))
    first = list(islice(drawn, 200))
    lengths = [len(encode(" " + code, add_special_tokens=False)["input_ids"]) for code in first]
    common = max(set(lengths), key=lengths.count)
    codes = []
    for code in chain(first, drawn):
        if len(encode(" " + code, add_special_tokens=False)["input_ids"]) == common:
            codes.append(code)
        if len(codes) == count:
            return codes
    raise UserError(f"Only {len(codes)} of {count} codes take {common} tokens with this tokenizer; ask for fewer.")


@dataclass(frozen=True)
class Coded:
    """A context with codes of its own.

    Attributes:
        number: from 0 on.
        codes: with which it is read.
        pair: two more, of which one is exchanged for the other; one token distinguishes them, as their first digits
            differ. The second may be that of other contexts, too.
    """

    number: int
    context: Context
    codes: tuple[str, ...]
    pair: tuple[str, str]


def coded_contexts(count: int, codes: int, rng: np.random.Generator, encode: Encoder) -> list[Coded]:
    """The first contexts, each with so many random codes and a pair.

    Raises:
        UserError: as `draw_codes`.
    """
    drawn = draw_codes(count * (codes + 1) + SPARE, rng, encode)
    owns, spare = drawn[count * codes : -SPARE], drawn[-SPARE:]
    coded = []
    for number, (context, own) in enumerate(zip(contexts()[:count], owns, strict=True)):
        other = next(code for code in spare if code[0] != own[0])
        coded.append(Coded(number, context, tuple(drawn[number * codes : (number + 1) * codes]), (own, other)))
    return coded
