"""Tasks: prompts with a reference answer, and how an answer is scored.

What a prompt says is independent of the model. Item `i` of a task depends on the seed and `i` alone, so a longer run
begins with the items of a shorter one.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvprobe.errors import UserError
from kvprobe.fingerprint import digest
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.messages import Message, Part
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

LEAST_ACCURACY = 0.2
"""A model below this share of right answers cannot do a task, however hopeless guessing is."""

_STAND_INS = ("a", "0")  # many tokenizers join a space with the word after it, and not with a digit


@dataclass(frozen=True)
class Item:
    """One thing to do.

    Attributes:
        id: its own within the task.
        chat: a conversation that ends in a user's message.
        answer: the reference.
        lead: what the assistant's reply begins with, before the model goes on.

    Raises:
        UserError: the conversation ends otherwise, the answer is empty, or spaces surround the answer or the lead.
    """

    id: str
    chat: Transcript
    answer: str
    lead: str = ""

    def __post_init__(self) -> None:
        if not self.chat.messages or self.chat.messages[-1].role != "user":
            raise UserError(f"The conversation of item {self.id!r} must end in a user's message, which is answered.")
        if not self.answer:
            raise UserError(f"The answer of item {self.id!r} is empty; it takes some text to score against.")
        for kind, text in (("answer", self.answer), ("lead", self.lead)):
            if text != text.strip():
                raise UserError(f"The {kind} of item {self.id!r} begins or ends with white space; remove it.")


@runtime_checkable
class Task(Protocol):
    """What a model is given to do."""

    @property
    def name(self) -> str:
        """What `find_task` finds it by."""
        ...

    @property
    def chance(self) -> float:
        """Accuracy of guessing among what the prompt names; 0 where guessing is hopeless."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """As many as an answer takes."""
        ...

    @property
    def one_line(self) -> bool:
        """Whether the answer ends at the first newline."""
        ...

    @property
    def scorers(self) -> tuple[str, ...]:
        """Their names; the first is the headline."""
        ...

    def items(self, count: int, seed: int) -> list[Item]:
        """The first `count` items; item i does not depend on `count`.

        In items that are drawn, the part `source` of the conversation is where the answer stands.
        """
        ...

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """What each scorer says of the text that follows the item's lead."""
        ...


def prompt(item: Item, tokenizer: Tokenizer) -> Tokens:
    """The tokens up to where the model goes on; the assistant's header and lead are the segment `generation`.

    With a lead they end with its last word. The space after it is left to the model, as whether a token begins with that
    space depends on the answer.

    Raises:
        UserError: the tokenizer joins the answer with the lead.
    """
    if not item.lead:
        return item.chat.tokens(tokenizer, generation_prompt=True)
    cut = {_up_to(answer, item, tokenizer) for answer in (item.answer, *_STAND_INS)}
    if len(cut) > 1:
        raise UserError(
            f"This tokenizer joins the answer of item {item.id!r} with its lead {item.lead!r}; use another lead."
        )
    return cut.pop()


def _up_to(answer: str, item: Item, tokenizer: Tokenizer) -> Tokens:
    """The tokens before this answer."""
    reply = Message("assistant", (Part(item.lead), Part(" " + answer, "answer")), "generation")
    tokens = Transcript((*item.chat.messages, reply)).tokens(tokenizer)
    return tokens[: tokens.part("answer").start]


def rankable(accuracy: int | float, chance: int | float) -> bool:
    """Whether a model does a task well enough for damage to show: see `too_hard`."""
    return accuracy >= _least(chance)


def too_hard(name: str, accuracy: int | float, chance: int | float) -> str | None:
    """One sentence that says why faults are not ranked on a task that the model cannot do; None where it can.

    It cannot if its accuracy on a sound cache is below 20 % or below three times chance. Where three times chance is out
    of reach, or nearly so (chance above 20 %), it is half-way from chance to perfect instead.
    """
    if rankable(accuracy, chance):
        return None
    return (
        f"Faults are not ranked on {name}: with a sound cache the model is right in {accuracy:.0%} of its items, and below "
        f"{_least(chance):.0%} (guessing gives {chance:.0%}) damage cannot be told from inability; give it an easier task."
    )


def _least(chance: int | float) -> float:
    """The lowest accuracy at which faults are ranked."""
    return max(LEAST_ACCURACY, min(3 * chance, (1 + chance) / 2))


def draw_items(name: str, count: int, seed: int, draw: Callable[[str, np.random.Generator], Item]) -> list[Item]:
    """Items drawn independently, each from its id and its own stream.

    Raises:
        UserError: a negative count or seed.
    """
    if count < 0 or seed < 0:
        raise UserError(f"{count} items of seed {seed} were asked for; neither can be negative.")
    # Tasks of the same seed must not draw alike, nor like a policy that draws.
    stream = zlib.crc32(name.encode())
    return [draw(f"{name}-{seed}-{index}", np.random.default_rng([seed, index, stream])) for index in range(count)]


def first_items(every: list[Item], count: int, name: str) -> list[Item]:
    """The first items of a task that is read from a file.

    Raises:
        UserError: there are not so many.
    """
    if not 0 <= count <= len(every):
        raise UserError(f"{count} items of {name} were asked for; there are {len(every)}.")
    return every[:count]


def items_digest(tasks: Sequence[Task], count: int, seed: int) -> str:
    """A hash of what these tasks give a model to read and score it by: their first items, and chance.

    Raises:
        UserError: a task does not have so many items.
    """
    return digest([repr((task.chance, task.items(count, seed))).encode() for task in tasks])


def first_line(text: str) -> str:
    """What an answer of one line is."""
    return text.partition("\n")[0]
