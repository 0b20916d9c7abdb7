"""Memos: a list of things, a summary that names one of them by its place in the list, and a question about that thing.

    list :                                                      system
    red apple blue boat green chair … .                         block
    summary : copied the third .                                summary
    question : which item ? answer :                            question    → chair

The summary's text says which place, never which thing. A model can answer in two ways: the summary's slots hold the thing
itself (*payload*), or they hold its place, and the block is looked up when the question comes (*pointer*). In an ordinary
run the two agree. They differ where the summary's slots come from a run whose block has the chosen thing at another place:
payload then gives the thing that the summary saw, a pointer the thing that now stands at that place.

The verb says which of the two the model `ordinal` was trained to use (see `models/train_ordinal.py`): `copied` is payload,
`located` a pointer, and `chosen` was left free.
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
"""As many as a list has things: all lists are of one length, so that a place is a distance too."""
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
"""One in so many pairs of a colour and an item is held out."""


@dataclass(frozen=True)
class Memo:
    """One list, one reference to it, one question.

    Attributes:
        things: colour and item of each place; no colour and no item comes twice.
        place: the place that the summary names, from 0.
        reference: what the summary's slots are to hold.
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
                f"A memo lists {len(PLACES)} things and names the place of one of them, from 0; this one lists "
                f"{len(self.things)} and names {self.place}."
            )

    @property
    def answer(self) -> str:
        """The right word, by the memo's own list."""
        colour, item = self.things[self.place]
        return item if self.asked == "item" else colour

    def swapped(self, other: int) -> "Memo":
        """The same memo with the thing that the summary names and the one at place `other` exchanged.

        Raises:
            UserError: `other` is the named place, or no place.
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
        """The memo as a transcript whose segments are `SEGMENTS`; what the model reads before it answers."""
        messages = [{"role": name, "content": text} for name, text in zip(SEGMENTS, self.texts(), strict=True)]
        return Transcript.from_messages(messages, SEGMENTS)


def vocabulary() -> tuple[str, ...]:
    """Every word of every memo, after the control tokens; a word's id is its place here."""
    frame = ("list", "summary", "question", "answer", "the", "which", ":", ".", "?")
    return ("<unk>", "<bos>", "<eos>", *frame, *VERBS.values(), *ASKED, *PLACES, *COLOURS, *ITEMS)


def is_held_out(colour: str, item: str) -> bool:
    """Whether this pair is kept from training."""
    return (COLOURS.index(colour) + ITEMS.index(item)) % HELD_OUT == 0


def draw(split: Split, rng: np.random.Generator, references: Sequence[Reference] = tuple(VERBS)) -> Memo:
    """A random memo whose things are all of one split: a pair of colour and item is never in both.

    Args:
        references: those to draw from.
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


_BESIDE = {
    held: {colour: tuple(item for item in ITEMS if is_held_out(colour, item) == held) for colour in COLOURS}
    for held in (False, True)
}
"""The items that each colour may stand beside, where held out and where not."""
