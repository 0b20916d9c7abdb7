"""Recite: repeat a list of common words in order."""

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvprobe.errors import UserError
from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import filled, talk
from kvprobe.tasks.task import Item, draw_items, first_line

_entries = partial(shipped_entries, "tasks/recite")


@dataclass(frozen=True)
class Recite:
    """Lists of hand-chosen words, and hand-written requests to repeat them.

    Attributes:
        words: number of words in each list.
    """

    words: int = 7

    name = "recite"
    chance = 0.0
    one_line = True
    scorers = ("exact",)

    def __post_init__(self) -> None:
        if not 1 <= self.words <= len(_entries()["words"]):
            raise UserError(f"words is {self.words}; give 1 to {len(_entries()['words'])}.")

    @property
    def max_new_tokens(self) -> int:
        # A token and a comma for each word, and half as many again for words of two tokens.
        return 3 * self.words

    def items(self, count: int, seed: int) -> list[Item]:
        """Lists without repetition; the words are the part `source`."""
        return draw_items(self.name, count, seed, self._item)

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """`exact`: the first line has these words in order and no others; case, punctuation and numbers are ignored."""
        return {"exact": _words(first_line(text)) == _words(item.answer)}

    def _item(self, id: str, rng: np.random.Generator) -> Item:
        phrasing = rng.choice(_entries()["phrasings"])
        listed = ", ".join(rng.choice(_entries()["words"], self.words, replace=False))
        request = filled(phrasing["request"], "words", listed, "source")
        return Item(id, talk(("question", request)), listed, phrasing["lead"])


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())
