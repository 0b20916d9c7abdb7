"""Recite: repeat a list of common words in order. Each word of the list must still be found, and in its place."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import yaml

from kvprobe.errors import UserError
from kvprobe.tasks.task import Item, draw_items, first_line
from kvprobe.text.transcript import Transcript


@dataclass(frozen=True)
class Recite:
    """Lists of hand-chosen words, asked for in hand-written ways.

    Attributes:
        words: in each list.
    """

    words: int = 7

    name = "recite"
    chance = 0.0
    one_line = True
    scorers = ("exact",)

    def __post_init__(self) -> None:
        if not 1 <= self.words <= len(_entries()["words"]):
            raise UserError(f"words is {self.words}; lists have 1 to {len(_entries()['words'])} words.")

    @property
    def max_new_tokens(self) -> int:
        # A token and a comma for each word, and half as many again for words of two tokens.
        return 3 * self.words

    def items(self, count: int, seed: int) -> list[Item]:
        """Lists without repetition; the words are the part `source`."""
        return draw_items(self.name, count, seed, self._item)

    def score(self, text: str, item: Item) -> dict[str, bool]:
        """`exact`: the first line holds these words in order and no others; case, punctuation and numbers do not count."""
        return {"exact": _words(first_line(text)) == _words(item.answer)}

    def _item(self, id: str, rng: np.random.Generator) -> Item:
        phrasing = rng.choice(_entries()["phrasings"])
        listed = ", ".join(rng.choice(_entries()["words"], self.words, replace=False))
        before, after = phrasing["request"].split("{words}")
        said: Any = [piece for piece in (before, {"text": listed, "name": "source"}, after) if piece]
        chat = Transcript.from_messages([{"role": "user", "content": said}], names=["question"])
        return Item(id, chat, listed, phrasing["lead"])


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


@cache
def _entries() -> dict[str, Any]:
    return yaml.safe_load(resources.files("kvprobe.tasks").joinpath("recite.yaml").read_text(encoding="utf-8"))
