"""Lossy mementos: a block of random digits, a memento that states the first of them and omits the others, and a
question that may ask for any of them once the block is hidden.

    3 7 1 9 2            block
    = 3 7                memento
    ? d                  question    → 9

The digits are uniform and independent, so the text holds exactly nothing about an omitted digit. All that a model
knows of it after the block is hidden, it has from what the slots of the memento hold beyond their text.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.text.transcript import Transcript

BASE = 10
BITS = math.log2(BASE)
"""The entropy of a digit."""
PLACE_NAMES = string.ascii_letters
"""What a question calls the digits of a block, in their order."""
WRITE, ASK = "=", "?"
"""Come before a memento, and before the name of a digit."""
SEGMENTS = BLOCK, MEMENTO, QUESTION = "block", "memento", "question"
Digits = Int[np.ndarray, "traces places"]


@dataclass(frozen=True)
class LossyDesign:
    """How much a memento omits.

    Attributes:
        asked: digits of a block that its memento omits.
        slots: of a memento: its sign, and each digit that it states.
    """

    asked: int
    slots: int

    def __post_init__(self) -> None:
        require("asked", self.asked, 1)
        require("slots", self.slots, 1)
        if self.places > len(PLACE_NAMES):
            raise UserError(
                f"A block of {self.places} digits is too long; {self.asked} omitted and {self.slots - 1} stated digits "
                f"together may be at most {len(PLACE_NAMES)}."
            )

    @property
    def stated(self) -> int:
        """Digits that the memento states: the first of the block."""
        return self.slots - 1

    @property
    def places(self) -> int:
        """Digits of a block."""
        return self.stated + self.asked

    @property
    def bits(self) -> float:
        """The entropy of what a memento omits."""
        return self.asked * BITS

    def draw(self, count: int, rng: np.random.Generator) -> Digits:
        """Blocks of random digits."""
        return rng.integers(BASE, size=(count, self.places))

    def alike(self, digits: Digits, rng: np.random.Generator) -> Digits:
        """Blocks of the same mementos, each of whose omitted digits is another one."""
        shift = rng.integers(1, BASE, size=digits.shape)
        shift[:, : self.stated] = 0
        return (digits + shift) % BASE

    def conversation(self, digits: Sequence[int], place: int) -> Transcript:
        """A block, its memento and the question for one of its digits; the segments are `SEGMENTS`."""
        texts = _text(*digits), _text(WRITE, *digits[: self.stated]), _text(ASK, PLACE_NAMES[place])
        messages = [{"role": name, "content": text} for name, text in zip(SEGMENTS, texts, strict=True)]
        return Transcript.from_messages(messages, SEGMENTS)


def _text(*words: object) -> str:
    return " ".join(map(str, words))


def vocabulary() -> tuple[str, ...]:
    """Every word of every trace, after the control tokens; a word's id is its index here."""
    return ("<unk>", "<bos>", "<eos>", WRITE, ASK, *map(str, range(BASE)), *PLACE_NAMES)
