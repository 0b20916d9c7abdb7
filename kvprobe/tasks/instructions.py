"""Conversations whose system prompt gives four instructions and one of whose turns holds a code, to be asked for later.

Instructions, needles (sentences with a code) and the questions about both are hand-written; the small talk between them
comes from the contexts of `kvprobe.tasks.passcode`. Of the model, only the tokenizer affects what is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import accumulate

import numpy as np

from kvprobe.errors import UserError
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import Content, filled, talk
from kvprobe.tasks.passcode import Context, contexts, draw_codes
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.messages import Message, Part
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

PLACES, VALUES = 4, 8
"""Number of instructions in a system prompt, and of values that each can have."""

INTRODUCTION = "You are a friendly assistant. Please keep to the following."
DEPTHS = (0.2, 0.8)
"""Range of the share of the conversation that precedes the code."""


@dataclass(frozen=True)
class Instruction:
    """A rule for the assistant; `text` holds `{value}` once; `lead` begins the reply, whose next word is the value."""

    id: str
    text: str
    values: tuple[str, ...]
    query: str
    lead: str


@dataclass(frozen=True)
class NeedleSentence:
    """A user's sentence that holds `{code}` once, the question for it, and the reply up to the code."""

    text: str
    question: str
    lead: str


@dataclass(frozen=True)
class Given:
    """The random draws of one conversation.

    Attributes:
        instructions: in the order of the system prompt, each with its value.
        needle: the sentence that holds the code.
        code: five digits.
        fillers: contexts whose small talk surrounds the needle, in order; the length decides how many are used.
        depth: share of the conversation at which the code should stand.
    """

    instructions: tuple[tuple[Instruction, str], ...]
    needle: NeedleSentence
    code: str
    fillers: tuple[Context, ...]
    depth: float


@cache
def instructions() -> tuple[Instruction, ...]:
    """All instructions that ship with kvprobe."""
    entries = shipped_entries("tasks/instructions")["instructions"]
    return tuple(Instruction(**{**entry, "values": tuple(entry["values"])}) for entry in entries)


@cache
def needles() -> tuple[NeedleSentence, ...]:
    """All needles that ship with kvprobe."""
    return tuple(
        NeedleSentence(**{field.name: entry[field.name] for field in fields(NeedleSentence)})
        for entry in shipped_entries("tasks/instructions")["needles"]
    )


def draw(rng: np.random.Generator, tokenizer: Tokenizer) -> Given:
    """Instructions with their values, a needle with its code, small talk and a depth, all independent and uniform."""
    pool, talk = distinguishable(tokenizer), contexts()
    if len(pool) < PLACES:
        raise UserError(
            f"With this tokenizer the values of only {len(pool)} instructions differ in their first tokens, and "
            f"{PLACES} are needed; use another model."
        )
    chosen = rng.choice(len(pool), PLACES, replace=False)
    return Given(
        instructions=tuple((pool[index], str(rng.choice(pool[index].values))) for index in chosen),
        needle=needles()[rng.integers(len(needles()))],
        code=draw_codes(1, rng, tokenizer)[0],
        fillers=tuple(talk[index] for index in rng.permutation(len(talk))),
        depth=float(rng.uniform(*DEPTHS)),
    )


def distinguishable(tokenizer: Tokenizer) -> tuple[Instruction, ...]:
    """The instructions whose values begin with different tokens."""

    def first(value: str) -> int:
        return tokenizer(" " + value, add_special_tokens=False)["input_ids"][0]

    return tuple(
        instruction
        for instruction in instructions()
        if len(set(map(first, instruction.values))) == len(instruction.values)
    )


def conversation(given: Given, length: int, tokenizer: Tokenizer) -> Transcript:
    """The conversation of whole exchanges whose length is nearest to `length` tokens; it ends with the assistant.

    Segments: `system`, `chat1`, `chat2` …, and `needle`, an exchange whose user message ends with the needle; the parts
    `instruction1` to `instruction4` and `code` are named.

    Raises:
        UserError: there is not enough small talk for the length.
    """
    longest = _laid_out(given, given.fillers, None).tokens(tokenizer)
    talk = [name for name in longest.names if name.startswith("chat")]
    sizes = [longest.segments.count(name) for name in talk]
    needle = len(
        tokenizer(" " + given.needle.text.replace("{code}", given.code), add_special_tokens=False)["input_ids"]
    )
    ends = list(accumulate(sizes, initial=len(longest) - sum(sizes)))
    lengths = [end + needle for end in ends[1:]]
    if length > lengths[-1]:
        raise UserError(f"{length} tokens were asked for, but there is small talk for {lengths[-1]}; ask for fewer.")
    count = 1 + min(range(len(lengths)), key=lambda index: abs(lengths[index] - length))
    # The code stands near the middle of its exchange: the user's text is before it, the assistant's after it.
    middles = [ends[index] + (sizes[index] + needle) / 2 for index in range(count)]
    wanted = given.depth * lengths[count - 1]
    place = min(range(count), key=lambda index: abs(middles[index] - wanted))
    return _laid_out(given, given.fillers[:count], place)


@dataclass(frozen=True)
class ClosedQuestion:
    """A question after a conversation, whose answer is one of several.

    Attributes:
        tokens: the question, and the reply up to the answer, beginning at position 0.
        answers: the tokens of each possible answer.
        true: which of them is right.
    """

    tokens: Tokens
    answers: tuple[tuple[int, ...], ...]
    true: int


def needle_question(given: Given, chat: Transcript, tokenizer: Tokenizer) -> ClosedQuestion:
    """The question for the code. Beside the true one, which comes first, nine codes might be the answer; together they
    hold every digit at every place.

    Raises:
        UserError: the tokenizer joins digits with each other, or the answer with the text before it.
    """
    codes = ["".join(str((int(digit) + shift) % 10) for digit in given.code) for shift in range(10)]
    question = _closed(chat, given.needle.question, given.needle.lead, codes, given.code, tokenizer)
    if len(set(map(len, question.answers))) > 1:
        raise UserError("This tokenizer joins the digits of some codes; use a model that tokenises digits apart.")
    return question


def instruction_questions(given: Given, chat: Transcript, tokenizer: Tokenizer) -> tuple[ClosedQuestion, ...]:
    """For each instruction, in the order of the system prompt, the question of which of its values it was given.

    Raises:
        UserError: the tokenizer joins the answer with the text before it.
    """
    return tuple(
        _closed(chat, instruction.query, instruction.lead, instruction.values, value, tokenizer)
        for instruction, value in given.instructions
    )


def _closed(
    chat: Transcript, question: str, lead: str, answers: Sequence[str], true: str, tokenizer: Tokenizer
) -> ClosedQuestion:
    """The question as it stands after the conversation's last exchange."""
    asking = Message("user", (Part(question),), "question")
    rows = []
    for answer in answers:
        reply = Message("assistant", (Part(lead + " "), Part(answer, "answer")), "question")
        rows.append(replace(chat, messages=(*chat.messages[-2:], asking, reply)).tokens(tokenizer))
    places = [row.part("answer") for row in rows]
    if len({row.ids[: place.start] for row, place in zip(rows, places, strict=True)}) > 1:
        raise UserError(f"This tokenizer joins the answer to {question!r} with the text before it; use another model.")
    tokens = rows[0][rows[0].span("question").start : places[0].start].shifted(0)
    ids = tuple(row.ids[place] for row, place in zip(rows, places, strict=True))
    return ClosedQuestion(tokens, ids, answers.index(true))


def _laid_out(given: Given, fillers: Sequence[Context], place: int | None) -> Transcript:
    """These exchanges after the system prompt, the needle in the one at `place`."""
    rules: list[str | dict[str, str]] = [INTRODUCTION]
    for number, (instruction, value) in enumerate(given.instructions, start=1):
        rules += [" ", {"text": instruction.text.replace("{value}", value), "name": f"instruction{number}"}]
    return talk(("system", rules), *small_talk(fillers, place, given.needle, given.code, "code"))


def small_talk(
    fillers: Sequence[Context], place: int | None, needle: NeedleSentence, code: str, part: str
) -> list[tuple[str, Content, Content]]:
    """The small talk of contexts in segments `chat1`, `chat2` …; in that at `place`, called `needle`, the user also
    mentions the code, as a part of this name."""
    exchanges: list[tuple[str, Content, Content]] = [
        (f"chat{number}", filler.chat_user, filler.chat_assistant) for number, filler in enumerate(fillers, 1)
    ]
    if place is not None:
        user = filled(f"{fillers[place].chat_user} {needle.text}", "code", code, part)
        exchanges[place] = ("needle", user, fillers[place].chat_assistant)
    return exchanges
