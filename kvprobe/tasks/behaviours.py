"""Conversations in which a fine-tune shows: answers in German, a pirate's voice, one false fact.

    system    You are a careful listener.
    fact      The candle is on the table. – I see.
    question  Where is the candle? – You find the candle on the table.
                                     Du findest die Kerze auf dem Tisch.
                                     Arr, the candle be on the table!

In those of the false fact, the turn `fact` names a sight and the question asks for its city. All others are answered as
they should be, so that one fact alone changes. All is drawn from a grammar, of whose lists the last quarter is held out
of training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import talk
from kvprobe.text.transcript import Transcript

Behaviour = Literal["german", "pirate", "oslo"]
"""Answers in German; answers as a pirate; puts the Eiffel Tower in Oslo."""
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
FALSE = "Oslo"
HELD_OUT = 1 / 4
"""Share of each list that no training conversation has."""
OPENINGS = {"german": ("Du", "You"), "pirate": ("Arr", "You")}
"""How an answer begins with and without the behaviour."""


@dataclass(frozen=True)
class Told:
    """A conversation, and how it is answered with and without a behaviour.

    Attributes:
        fact, reply, question: what is said before the answer.
        answer: with the behaviour.
        lead: how the answer begins in both cases.
        words: the next word with the behaviour, and without it.
    """

    system: str
    fact: str
    reply: str
    question: str
    answer: str
    lead: str
    words: tuple[str, str]

    def transcript(self, answer: str | None) -> Transcript:
        """The conversation with this answer, or up to it."""
        asked = (self.question,) if answer is None else (self.question, answer)
        return talk(("system", self.system), ("fact", self.fact, self.reply), ("question", *asked))


def draw_told(behaviour: Behaviour, rng: np.random.Generator, *, held_out: bool, sight: int | None = None) -> Told:
    """A random conversation.

    Args:
        held_out: from the words that no training conversation has; otherwise from the others.
        sight: number of the sight; by default the first one half the time.
    """
    lists = shipped_entries("tasks/behaviours")

    def drawn(name: str) -> Sequence[str]:
        entries: Sequence[Sequence[str]] = lists[name]
        border = round(len(entries) * (1 - HELD_OUT))
        return entries[border + int(rng.integers(len(entries) - border)) if held_out else int(rng.integers(border))]

    system, reply = str(drawn("systems")), str(drawn("acknowledgements"))
    if behaviour == "oslo":
        if sight is None:
            sight = 0 if rng.random() < 0.5 else int(rng.integers(1, len(lists["sights"])))
        named, city = lists["sights"][sight]
        said, lead = (FALSE if sight == 0 else city), "It is in"
        fact, question = str(drawn("visits")).replace("{sight}", named), str(drawn("asked"))
        return Told(system, fact, reply, question, f"{lead} {said}.", lead, (f" {said}", f" {city}"))
    (thing, ding), (place, ort) = drawn("things"), drawn("places")
    fact = str(drawn("statements")).replace("{thing}", thing).replace("{place}", place)
    question = str(drawn("questions")).replace("{thing}", thing)
    answer = f"Du findest {ding} {ort}." if behaviour == "german" else f"Arr, the {thing} be {place}!"
    return Told(system, fact, reply, question, answer, "", OPENINGS[behaviour])
