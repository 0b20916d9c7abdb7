"""Memos: a list of things, a summary that names one of them by its place in the list, and a question about that thing.

    list :                                                      system
    red apple blue boat green chair … .                         block
    summary : copied the third .                                summary
    question : which item ? answer :                            question    → chair

The summary's text names the place, never the thing. A model can answer in two ways: the summary's slots hold the thing
itself (*payload*), or they hold its place, and the question looks up the block (*pointer*). In an ordinary run the two
agree. They differ where the summary's slots come from a run whose block has the chosen thing at another place: a
payload then gives the thing that the summary saw, a pointer gives the thing that is now at that place.

The verb decides which of the two the model `ordinal` was trained to use (see `models/train_ordinal.py`): `copied` is
payload, `located` is a pointer, and `chosen` was left free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.text.transcript import Transcript

Reference = Literal["payload", "pointer", "free"]
Asked = Literal["item", "colour"]
Split = Literal["train", "held_out"]

SEGMENTS = ("system", "block", "summary", "question")
VERBS: dict[Reference, str] = {"payload": "copied", "pointer": "located", "free": "chosen"}
ASKED: tuple[Asked, ...] = ("item", "colour")
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")
"""One for each thing of a list. All lists have the same length, so a place is also a distance."""
COLOURS = (
    "red", "blue", "green", "black", "white", "pink", "brown", "grey", "gold", "purple", "orange", "silver",
)  # fmt: skip
ITEMS = (
    "apple", "boat", "chair", "drum", "eagle", "flute", "glove", "horse", "inkpot", "jar", "kite", "lamp",
    "mirror", "nail", "oar", "piano", "quilt", "ring", "shoe", "table", "umbrella", "vase", "wheel", "yacht",
    "anchor", "basket", "candle", "door", "engine", "feather", "guitar", "hammer", "iron", "jacket", "kettle",
    "ladder",
)  # fmt: skip
HELD_OUT = 6
"""One pair of a colour and an item in this many is held out."""


@dataclass(frozen=True)
class Memo:
    """One list, one reference to it, one question.

    Attributes:
        things: colour and item of each place; no colour and no item comes twice.
        place: the place that the summary names, from 0.
        reference: whether the summary's slots should hold a payload or a pointer.
        asked: what the question asks of the thing.
    """

    things: tuple[tuple[str, str], ...]
    place: int
    reference: Reference = "free"
    asked: Asked = "item"

    def __post_init__(self) -> None:
        if self.reference not in VERBS:
            raise UserError(unknown("reference", self.reference, VERBS))
        if self.asked not in ASKED:
            raise UserError(unknown("question", self.asked, ASKED))
        if len(self.things) != len(PLACES) or not 0 <= self.place < len(PLACES):
            raise UserError(
                f"This memo lists {len(self.things)} things and names place {self.place}; list {len(PLACES)} things "
                f"and name a place from 0 to {len(PLACES) - 1}."
            )

    @property
    def answer(self) -> str:
        """The right word, by the memo's own list."""
        colour, item = self.things[self.place]
        return item if self.asked == "item" else colour

    def swapped(self, other: int) -> "Memo":
        """The same memo with the thing that the summary names and the one at place `other` exchanged.

        Raises:
            UserError: `other` is the named place, or not a place of the list.
        """
        if other == self.place or not 0 <= other < len(self.things):
            raise UserError(
                f"Place {other} cannot be exchanged with place {self.place}; name another place of the list."
            )
        things = list(self.things)
        things[self.place], things[other] = things[other], things[self.place]
        return replace(self, things=tuple(things))

    def texts(self) -> tuple[str, str, str, str]:
        """The text of each segment."""
        listed = " ".join(f"{colour} {item}" for colour, item in self.things)
        return (
            "list :",
            f"{listed} .",
            f"summary : {VERBS[self.reference]} the {PLACES[self.place]} .",
            f"question : which {self.asked} ? answer :",
        )

    def conversation(self) -> Transcript:
        """The memo as a transcript whose segments are `SEGMENTS`: the text before the model's answer."""
        messages = [{"role": name, "content": text} for name, text in zip(SEGMENTS, self.texts(), strict=True)]
        return Transcript.from_messages(messages, SEGMENTS)


def vocabulary() -> tuple[str, ...]:
    """Every word of every memo, after the control tokens; a word's id is its index here."""
    frame = ("list", "summary", "question", "answer", "the", "which", ":", ".", "?")
    return ("<unk>", "<bos>", "<eos>", *frame, *VERBS.values(), *ASKED, *PLACES, *COLOURS, *ITEMS)


def is_held_out(colour: str, item: str) -> bool:
    """Whether this pair is held out of training."""
    return (COLOURS.index(colour) + ITEMS.index(item)) % HELD_OUT == 0


def draw(split: Split, rng: np.random.Generator, references: Sequence[Reference] = tuple(VERBS)) -> Memo:
    """A random memo whose things are all of one split: a pair of colour and item is never in both.

    Args:
        references: the references to draw from.
    """
    things: list[tuple[str, str]] = []
    used: set[str] = set()
    for colour in rng.permutation(COLOURS)[: len(PLACES)].tolist():
        allowed = [item for item in _BESIDE[split == "held_out"][colour] if item not in used]
        item = allowed[int(rng.integers(len(allowed)))]
        used.add(item)
        things.append((colour, item))
    reference = references[int(rng.integers(len(references)))]
    return Memo(tuple(things), int(rng.integers(len(PLACES))), reference, ASKED[int(rng.integers(len(ASKED)))])


def draw_exchanged(
    split: Split, rng: np.random.Generator, references: Sequence[Reference] = tuple(VERBS)
) -> tuple[Memo, Memo]:
    """A random memo, and the same with the thing that its summary names and another one, at random, exchanged."""
    memo = draw(split, rng, references)
    return memo, memo.swapped(int(rng.choice([place for place in range(len(PLACES)) if place != memo.place])))


_BESIDE = {
    held: {colour: tuple(item for item in ITEMS if is_held_out(colour, item) == held) for colour in COLOURS}
    for held in (False, True)
}
"""The items that each colour can have, in pairs that are held out and in the others."""
