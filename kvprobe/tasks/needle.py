"""Needle: small talk with a code in one sentence, then a question that asks for the code.

The sentences are those of `kvprobe.tasks.instructions`, the small talk that of `kvprobe.tasks.passcode`.
"""

import re
from dataclasses import dataclass

import numpy as np

from kvprobe.errors import UserError
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.instructions import needles, small_talk
from kvprobe.tasks.passcode import CODE_LENGTH, contexts
from kvprobe.tasks.task import Item, draw_items, first_line


@dataclass(frozen=True)
class Needle:
    """Conversations of small talk in which the user mentions a code.

    Attributes:
        exchanges: number of exchanges of small talk, about forty tokens each; one of them mentions the code.
    """

    exchanges: int = 3

    name = "needle"
    chance = 0.0
    max_new_tokens = CODE_LENGTH + 2  # a space, the digits, and the end of the sentence
    one_line = True
    scorers = ("exact",)

    def __post_init__(self) -> None:
        if not 1 <= self.exchanges <= len(contexts()):
            raise UserError(f"exchanges is {self.exchanges}; give 1 to {len(contexts())}.")

    def items(self, count: int, seed: int) -> list[Item]:
        """Segments: `chat1`, `chat2` …, one of them called `needle` instead, and `question`; `source` is the code."""
        return draw_items(self.name, count, seed, self._item)

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """`exact`: the code is among the numbers of the first line."""
        return {"exact": item.answer in re.findall(r"\d+", first_line(text))}

    def _item(self, id: str, rng: np.random.Generator) -> Item:
        needle = needles()[rng.integers(len(needles()))]
        code = f"{rng.integers(10**CODE_LENGTH):0{CODE_LENGTH}d}"
        fillers = [contexts()[index] for index in rng.choice(len(contexts()), self.exchanges, replace=False)]
        place = int(rng.integers(self.exchanges))
        exchanges = small_talk(fillers, place, needle, code, "source")
        return Item(id, talk(*exchanges, ("question", needle.question)), code, needle.lead)
