"""Retrieve: give the number that belongs to one name in a list of pairs of a name and a number."""

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvprobe.errors import UserError
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import talk
from kvprobe.tasks.task import Item, draw_items, first_line

_entries = partial(shipped_entries, "tasks/retrieve")


@dataclass(frozen=True)
class Retrieve:
    """Lists of pairs, in hand-written phrasings.

    Attributes:
        keys: number of pairs in each list.
        digits: length of each value; the values of a list differ, so none is the beginning of another.
    """

    keys: int = 6
    digits: int = 3

    name = "retrieve"
    one_line = True
    scorers = ("exact",)

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 9:
            raise UserError(f"digits is {self.digits}; give 1 to 9.")
        most = min(len(_entries()["keys"]), self._numbers)
        if not 2 <= self.keys <= most:
            raise UserError(f"keys is {self.keys}; with values of {self.digits} digits, give 2 to {most}.")

    @property
    def chance(self) -> float:
        return 1 / self.keys

    @property
    def max_new_tokens(self) -> int:
        # A space, the digits, and the end of the sentence.
        return self.digits + 2

    def items(self, count: int, seed: int) -> list[Item]:
        """Lists of different names and values in random order; the value asked for is the part `source`."""
        return draw_items(self.name, count, seed, self._item)

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """`exact`: the first number of the first line is the value."""
        number = re.search(r"\d+", first_line(text))
        return {"exact": number is not None and number[0] == item.answer}

    @property
    def _numbers(self) -> int:
        """How many numbers have this many digits."""
        return 9 * 10 ** (self.digits - 1)

    def _item(self, id: str, rng: np.random.Generator) -> Item:
        phrasing = rng.choice(_entries()["phrasings"])
        keys = [str(key) for key in rng.choice(_entries()["keys"], self.keys, replace=False)]
        smallest = 10 ** (self.digits - 1)
        values = [str(smallest + number) for number in rng.choice(self._numbers, self.keys, replace=False)]
        asked = int(rng.integers(self.keys))
        pieces: list[str | dict[str, str]] = [phrasing["introduction"]]
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            before, after = phrasing["line"].replace("{key}", key).split("{value}")
            pieces += ["\n" + before, {"text": value, "name": "source"} if index == asked else value, after]
        question, lead = (phrasing[part].replace("{key}", keys[asked]) for part in ("question", "lead"))
        pieces.append("\n\n" + question)
        return Item(id, talk(("question", pieces)), values[asked], lead)
