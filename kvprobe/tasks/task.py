"""Tasks: prompts with a reference answer, and how an answer is scored.

Prompts do not depend on the model. Item `i` of a task depends only on the seed and on `i`, so a longer run begins with
the items of a shorter one.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from kvprobe.errors import UserError
from kvprobe.fingerprint import digest
from kvprobe.names import full_repr
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.messages import Message, Part
from kvprobe.text.tokens import ANSWER_HEADER, Tokens
from kvprobe.text.transcript import Transcript

LEAST_ACCURACY = 0.2
"""A model with a smaller share of right answers cannot do a task, even where guessing is hopeless."""

_STAND_INS = ("a", "0")  # many tokenizers join a space with the word after it, but not with a digit


@dataclass(frozen=True)
class Item:
    """A prompt with its reference answer.

    Attributes:
        id: unique within the task.
        chat: a conversation that ends in a user's message.
        answer: the reference.
        lead: the beginning of the assistant's reply, after which the model goes on.

    Raises:
        UserError: the conversation ends otherwise, the answer is empty, or spaces surround the answer or the lead.
    """

    id: str
    chat: Transcript
    answer: str
    lead: str = ""

    def __post_init__(self) -> None:
        if not self.chat.messages or self.chat.messages[-1].role != "user":
            raise UserError(f"The conversation of item {self.id!r} must end in a message of the user; add one.")
        if not self.answer:
            raise UserError(f"The answer of item {self.id!r} is empty; give a text to score against.")
        for kind, text in (("answer", self.answer), ("lead", self.lead)):
            if text != text.strip():
                raise UserError(f"The {kind} of item {self.id!r} begins or ends with white space; remove it.")


@runtime_checkable
class Task(Protocol):
    """Items for a model, and how its answers are scored."""

    @property
    def name(self) -> str:
        """The name under which `find_task` knows it."""
        ...

    @property
    def chance(self) -> float:
        """Accuracy of guessing among the values that the prompt names; 0 where guessing is hopeless."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Enough for an answer."""
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
        """The verdict of each scorer on the text that follows the item's lead."""
        ...


def prompt(item: Item, tokenizer: Tokenizer) -> Tokens:
    """The tokens that the model reads before it answers; the assistant's header and lead are the segment `generation`.

    With a lead they end with its last word. The space after it is left to the model, because whether a token begins
    with that space depends on the answer.

    Raises:
        UserError: the tokenizer joins the answer with the lead.
    """
    if not item.lead:
        return item.chat.tokens(tokenizer, generation_prompt=True)
    prompts = {_up_to(answer, item, tokenizer) for answer in (item.answer, *_STAND_INS)}
    if len(prompts) > 1:
        raise UserError(
            f"This tokenizer joins the answer of item {item.id!r} with its lead {item.lead!r}; use another lead."
        )
    return prompts.pop()


def _up_to(answer: str, item: Item, tokenizer: Tokenizer) -> Tokens:
    """The tokens before this answer."""
    reply = Message("assistant", (Part(item.lead), Part(" " + answer, "answer")), ANSWER_HEADER)
    tokens = Transcript((*item.chat.messages, reply)).tokens(tokenizer)
    return tokens[: tokens.part("answer").start]


def rankable(accuracy: int | float, chance: int | float) -> bool:
    """Whether a model does a task well enough for damage to be visible: see `too_hard`."""
    return accuracy >= _least(chance)


def too_hard(name: str, accuracy: int | float, chance: int | float) -> str | None:
    """One sentence on why faults are not ranked on a task that the model cannot do; None where it can.

    It cannot if its accuracy on a sound cache is below 20 % or below three times chance. Where three times chance is
    at or near 100 % (chance above 20 %), the limit is half-way from chance to perfect instead.
    """
    if rankable(accuracy, chance):
        return None
    return (
        f"Faults are not ranked on {name}: with a sound cache the model is right in {accuracy:.0%} of its items, and "
        f"below {_least(chance):.0%} (guessing gives {chance:.0%}) damage is indistinguishable from inability; give "
        f"it an easier task."
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
        raise UserError(f"{count} items of seed {seed} were asked for; both must be at least 0.")
    # Tasks of the same seed must draw differently from each other, and from policies.
    stream = zlib.crc32(name.encode())
    return [draw(f"{name}-{seed}-{index}", np.random.default_rng([seed, index, stream])) for index in range(count)]


def first_items(items: list[Item], count: int, name: str) -> list[Item]:
    """The first items of a task that is read from a file.

    Raises:
        UserError: there are not so many.
    """
    if not 0 <= count <= len(items):
        raise UserError(f"{count} items of {name} were asked for; there are {len(items)}, so ask for at most as many.")
    return items[:count]


def items_digest(tasks: Sequence[Task], count: int, seed: int) -> str:
    """A hash of the first items and the chance of these tasks.

    Raises:
        UserError: a task has fewer items.
    """
    return digest([full_repr((task.chance, task.items(count, seed))).encode() for task in tasks])


def first_line(text: str) -> str:
    """The text up to the first newline."""
    return text.partition("\n")[0]


def shown_task(name: str) -> str:
    """A task's name without the folders of a file."""
    kind, colon, file = name.rpartition(":")
    return f"{kind}{colon}{Path(file).name}"
