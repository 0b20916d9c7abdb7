"""Conversations in which a user's message holds what must go: a code, a name, instructions, or wrong steps.

Each has the segments system, T1 (small talk), turn (the user's message), reply (which does not repeat it) and T2, after
which it is asked for. Secrets are words in the places of the message, each drawn from a few, so that probes have
classes to read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.studies.forgetting import Kind
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.instructions import distinguishable
from kvprobe.tasks.passcode import CODE_LENGTH, Context, contexts
from kvprobe.tasks.secrets import secret
from kvprobe.tasks.steps import REGISTERS, draw_problem, on_registers
from kvprobe.tasks.worded_steps import in_english, question_in_english
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

TURN, REPLY = "turn", "reply"
"""The message that must go, and the reply that has read it."""
DIGITS = tuple("0123456789")
SURNAMES = 10
RULES = 3
LISTED = 512
"""Of more secrets that a case can have, so many are drawn to see how many tokens they take."""
Words = tuple[str, ...]
"""A secret: a word for each place."""


@dataclass(frozen=True)
class ForgettingCase:
    """A conversation, and what can stand in the places of its secret.

    Attributes:
        places: of each place, the words.
        chat: the conversation with these words in the places.
        ask, lead: the question for the secret, and how the answer begins.
        answer: how it goes on.
    """

    id: str
    kind: Kind
    places: tuple[Words, ...]
    chat: Callable[[Words], Transcript]
    ask: str
    lead: str
    answer: Callable[[Words], str]

    @property
    def classes(self) -> int:
        return max(map(len, self.places))

    def keeps(self, secrets: Sequence[Words]) -> bool:
        """Whether the text beside the message is the same whatever the secret."""
        chats = (self.chat(words).messages for words in secrets)
        return len({tuple(one for one in messages if one.segment != TURN) for messages in chats}) == 1


@dataclass(frozen=True)
class Drawn:
    """A case with its secrets, which all take equally many tokens.

    Attributes:
        asked: numbers of secrets whose answers differ and take equally many tokens.
        shares: of each place, how often each of its words stands there among all secrets that take as many tokens.
        possible: how many these are.
    """

    case: ForgettingCase
    secrets: tuple[Words, ...]
    tokens: tuple[Tokens, ...]
    asked: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    possible: float

    @property
    def labels(self) -> Int[Tensor, "places secrets"]:
        pairs = [zip(words, self.case.places, strict=True) for words in self.secrets]
        return torch.tensor([[among.index(word) for word, among in pair] for pair in pairs]).T

    @property
    def chance(self) -> float:
        """The share of the places that one guesses who has read nothing: in each, its most frequent word."""
        return sum(map(max, self.shares)) / len(self.shares)

    def some(self, rows: Sequence[int]) -> "Drawn":
        """With these secrets alone, all of which are asked."""
        secrets, tokens = zip(*((self.secrets[row], self.tokens[row]) for row in rows), strict=True)
        return replace(self, secrets=secrets, tokens=tokens, asked=tuple(range(len(rows))))


def cases(kind: Kind, count: int, tokenizer: Tokenizer, seed: int) -> list[ForgettingCase]:
    """The first so many conversations of a kind."""
    return [_MADE[kind](number, tokenizer, seed) for number in range(count)]


def draw(case: ForgettingCase, count: int, asked: int, tokenizer: Tokenizer, rng: np.random.Generator) -> Drawn:
    """Random secrets.

    Raises:
        UserError: too few take equally many tokens.
    """
    total = prod(map(len, case.places))
    if total <= LISTED:
        listed = list(product(*case.places))
        words = [listed[number] for number in rng.permutation(total)]
    else:
        picks = rng.integers([len(among) for among in case.places], size=(max(LISTED, 2 * count), len(case.places)))
        words = [tuple(among[at] for among, at in zip(case.places, row, strict=True)) for row in picks.tolist()]
        words = list(dict.fromkeys(words))
    said = [next(one.text for one in case.chat(each).messages if one.segment == TURN) for each in words]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in said]
    common = max(set(lengths), key=lengths.count)
    alike = [each for each, length in zip(words, lengths, strict=True) if length == common]
    tokens = [case.chat(each).tokens(tokenizer) for each in alike[:count]]
    if len(alike) < count or len(set(map(len, tokens))) > 1:
        raise UserError(
            f"Of the secrets of {case.id!r} only {min(len(alike), count)} are alike in tokens with this tokenizer, and "
            f"{count} are wanted; set secrets to as many, or use another model."
        )
    counts = [Counter(places) for places in zip(*alike, strict=True)]
    shares = [
        # Where all that were drawn take as many tokens, so do all, and the words of a place are equally frequent.
        [1 / len(among) if len(alike) == len(words) else found[word] / len(alike) for word in among]
        for among, found in zip(case.places, counts, strict=True)
    ]
    return Drawn(
        case,
        tuple(alike[:count]),
        tuple(tokens),
        _asked(case, alike[:count], asked, tokenizer),
        tuple(map(tuple, shares)),
        total * len(alike) / len(words),
    )


def _asked(case: ForgettingCase, secrets: Sequence[Words], count: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    answers = [case.answer(words) for words in secrets]
    lengths = [len(tokenizer(case.lead + text, add_special_tokens=False)["input_ids"]) for text in answers]
    common = max(set(lengths), key=lengths.count)
    first = {text: number for number, text in reversed([*enumerate(answers)]) if lengths[number] == common}
    if len(first) < 2:
        raise UserError(f"The answers of {case.id!r} do not differ with this tokenizer; use another model.")
    return tuple(sorted(first.values())[:count])


def _talk(context: Context, message: str, reply: str, after: Sequence[str]) -> Transcript:
    made = talk(
        ("system", context.system),
        ("T1", context.chat_user, context.chat_assistant),
        (TURN, message, reply),
        ("T2", *after),
    )
    messages = [
        replace(one, segment=REPLY) if (one.segment, one.role) == (TURN, "assistant") else one for one in made.messages
    ]
    return replace(made, messages=tuple(messages))


def _told(context: Context, words: Words, joint: str) -> Transcript:
    message = context.secret_user.replace("{code}", joint.join(words))
    return _talk(context, message, context.secret_assistant, (context.ask_summary_2, context.summary_2))


def _code(number: int, tokenizer: Tokenizer, seed: int) -> ForgettingCase:
    context = contexts()[number]
    return ForgettingCase(
        f"code-{context.id}",
        "code",
        (DIGITS,) * CODE_LENGTH,
        lambda words: _told(context, words, ""),
        context.question,
        f"{context.answer} ",
        "".join,
    )


def _name(number: int, tokenizer: Tokenizer, seed: int) -> ForgettingCase:
    names = secret("name")
    context = names.contexts[number]
    surnames = tuple(dict.fromkeys(text.split()[1] for text in names.label_of))[:SURNAMES]
    return ForgettingCase(
        f"name-{context.id}",
        "name",
        (names.target.classes, surnames),
        lambda words: _told(context, words, " "),
        context.question,
        f"{context.answer} ",
        " ".join,
    )


def _instruction(number: int, tokenizer: Tokenizer, seed: int) -> ForgettingCase:
    pool, talks = distinguishable(tokenizer), contexts()
    rules = [pool[(RULES * number + place) % len(pool)] for place in range(RULES)]
    context, later = talks[number], talks[(number + 1) % len(talks)]

    def chat(words: Words) -> Transcript:
        said = [rule.text.replace("{value}", word) for rule, word in zip(rules, words, strict=True)]
        message = " ".join(["From now on, please keep to the following.", *said])
        return _talk(context, message, "Understood, I will keep to that.", (later.chat_user, later.chat_assistant))

    return ForgettingCase(
        f"instruction-{number}",
        "instruction",
        tuple(rule.values for rule in rules),
        chat,
        rules[0].query,
        f"{rules[0].lead} ",
        lambda words: words[0],
    )


def _steps(number: int, tokenizer: Tokenizer, seed: int) -> ForgettingCase:
    """Three steps that a user hands over, each with a random result, and the first register once more."""
    talks = contexts()
    rng = np.random.default_rng([seed, 2, number])
    problem = on_registers([*REGISTERS, REGISTERS[0]], draw_problem(len(REGISTERS) + 1, rng))
    context, later = talks[number], talks[(number + 1) % len(talks)]

    def chat(words: Words) -> Transcript:
        steps = problem.steps({place: int(word) for place, word in enumerate(words)})[: len(REGISTERS)]
        message = f"{question_in_english(problem)} My steps so far:\n{in_english(steps)}"
        reply = "Thank you, I have read your steps and will go on from there."
        return _talk(context, message, reply, (later.chat_user, later.chat_assistant))

    return ForgettingCase(
        f"steps-{number}",
        "steps",
        (DIGITS,) * len(REGISTERS),
        chat,
        f"Please write the next step of the sum, on {REGISTERS[0]}, in one line.",
        f"{REGISTERS[0]}: ",
        lambda words: words[0],
    )


_MADE: dict[Kind, Callable[[int, Tokenizer, int], ForgettingCase]] = {
    "code": _code,
    "name": _name,
    "instruction": _instruction,
    "steps": _steps,
}
