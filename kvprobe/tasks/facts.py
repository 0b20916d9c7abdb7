"""Pairs of conversations that differ in one fact, asked for at the end: a code, a name, a number or an instruction.

Forty-eight hand-written conversations, twelve of each kind, differ in topic, people, phrasing and length. Each has a
hole that either of two values fills, and five segments: system, T1 (small talk), fact (holds the value), T2 (small
talk on another topic) and question. The text before the question is cached; its tokens agree slot by slot except for
the value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import filled, talk
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

KINDS = ("code", "name", "number", "instruction")


@dataclass(frozen=True)
class Fact:
    """One hand-written conversation; `fact_user` holds `{fact}` once, and no other text depends on the value.

    Attributes:
        lead: how the reply to the question begins; the value is its next word. It may be empty.
        values: the two that may fill the hole; `pair` refuses them where a tokenizer needs different numbers of tokens.
    """

    id: str
    kind: str
    system: str
    chat_user: str
    chat_assistant: str
    fact_user: str
    fact_assistant: str
    later_user: str
    later_assistant: str
    question: str
    lead: str
    values: tuple[str, str]


@dataclass(frozen=True)
class FactPair:
    """The two conversations of a fact, in tokens.

    Attributes:
        prompts: what is cached, once with each value: the segments before `question`; the value is the part `value`.
        suffix: the question and the beginning of the reply, up to where the two replies differ; the same for both.
        answers: the next token of each reply.
        number, half: its place among several, and in which half of them; see `pairs_in_turn`.
    """

    id: str
    kind: str
    prompts: tuple[Tokens, Tokens]
    suffix: Tokens
    answers: tuple[int, int]
    number: int = 0
    half: int = 0

    @property
    def turned(self) -> "FactPair":
        """The same with the second conversation first."""
        return replace(self, prompts=self.prompts[::-1], answers=self.answers[::-1])

    def divided(self, part: str) -> "FactPair":
        """The same with a part of both prompts as a segment of its own; see `Tokens.divided`."""
        first, second = (prompt.divided(part) for prompt in self.prompts)
        return replace(self, prompts=(first, second))

    def ending(self, last: int) -> "FactPair":
        """The same with so many tokens in the suffix, the others before them in both prompts."""
        first, second = (prompt + self.suffix for prompt in self.prompts)
        cut = len(first) - last
        return replace(self, prompts=(first[:cut], second[:cut]), suffix=first[cut:])


def facts(kinds: Sequence[str] = KINDS, each: int | None = None) -> tuple[Fact, ...]:
    """The facts of these kinds that ship with kvprobe, kind by kind: the first `each` of a kind, or all.

    Raises:
        UserError: there is no such kind.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(unknown("kind of fact", kind, KINDS))
    return tuple(fact for kind in kinds for fact in [fact for fact in _shipped() if fact.kind == kind][:each])


def halves(chosen: Sequence[Fact], seed: int) -> list[int]:
    """Half 0 or 1 for each fact, with equally many of each kind, so that one half can test a result of the other.

    Raises:
        UserError: there is only one fact.
    """
    if len(chosen) < 2:
        raise UserError("One conversation cannot be split into halves; give prompts=2 or more, or more kinds.")
    rng, half, start = np.random.default_rng([seed, 1]), [0] * len(chosen), 0
    for kind in dict.fromkeys(fact.kind for fact in chosen):
        places = rng.permutation([place for place, fact in enumerate(chosen) if fact.kind == kind])
        for number, place in enumerate(places, start):
            half[place] = number % 2
        start += len(places)
    return half


def conversation(fact: Fact, value: str) -> Transcript:
    """The conversation with this value: the part `value` of the segment `fact`, and the part `answer` of `question`."""
    answer = {"text": value, "name": "answer"}
    return talk(
        ("system", fact.system),
        ("T1", fact.chat_user, fact.chat_assistant),
        ("fact", filled(fact.fact_user, "fact", value, "value"), fact.fact_assistant),
        ("T2", fact.later_user, fact.later_assistant),
        ("question", fact.question, [fact.lead + " ", answer] if fact.lead else [answer]),
    )


def pair(fact: Fact, tokenizer: Tokenizer) -> FactPair:
    """The two conversations of a fact in the tokens of this tokenizer and its chat template.

    Raises:
        UserError: the values take different numbers of tokens, or the replies are indistinguishable.
    """
    first, second = (conversation(fact, value).tokens(tokenizer) for value in fact.values)
    start = first.span("question").start
    if second.span("question").start != start:
        raise UserError(
            f"The prompts of fact {fact.id!r} have {start} and {second.span('question').start} tokens with this "
            f"tokenizer; give values that take equally many."
        )
    replies = [tokens.ids[start : tokens.part("answer").stop] for tokens in (first, second)]
    shared = next((index for index, (one, other) in enumerate(zip(*replies, strict=False)) if one != other), None)
    if shared is None:
        raise UserError(
            f"With this tokenizer one reply of fact {fact.id!r} begins with all of the other, so no token "
            f"distinguishes them; give values that differ in a token."
        )
    cut = start + shared
    return FactPair(
        fact.id, fact.kind, (first[:start], second[:start]), first[start:cut], (first.ids[cut], second.ids[cut])
    )


def pairs_in_turn(chosen: Sequence[Fact], tokenizer: Tokenizer, seed: int) -> list[FactPair]:
    """The pair of each fact with its number and half; every second one is turned, so that neither value is always
    in the first conversation.

    Args:
        seed: see `halves`.

    Raises:
        UserError: see `pair` and `halves`.
    """
    pairs = []
    for number, (fact, half) in enumerate(zip(chosen, halves(chosen, seed), strict=True)):
        both = pair(fact, tokenizer)
        pairs.append(replace(both.turned if number % 2 else both, number=number, half=half))
    return pairs


@cache
def _shipped() -> tuple[Fact, ...]:
    return tuple(
        Fact(**{**entry, "kind": kind, "values": tuple(entry["values"])})
        for kind, entries in shipped_entries("tasks/facts").items()
        for entry in entries
    )
