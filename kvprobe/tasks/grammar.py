"""Conversations that state a random code, sum it up without saying it, and go on: from a grammar, so that tens of
thousands differ.

T1 is small talk, T2 states the code and is hidden later, `summary` asks for a summary and gives it, T3 and T4 are turns
on something else, and `ask` asks for the code. All words but the code are drawn apart from it. Of each list of the
grammar some entries are held out: a test conversation has other wording than all that train (every sentence of it),
another subject, or both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from kvprobe.shipped import shipped_entries
from kvprobe.tasks.exchanges import filled, talk
from kvprobe.tasks.passcode import CODE_LENGTH
from kvprobe.text.transcript import Transcript

HeldOut = Literal["nothing", "wording", "subject", "both"]
"""What of a test conversation is new to a reader, beside its code."""
HELD_OUT: tuple[HeldOut, ...] = get_args(HeldOut)
GRAMMAR = "tasks/grammar"
SEEN = 2 / 3
"""Share of each list that training conversations are drawn from."""
SYSTEM = "You are a helpful assistant."
WORDED = ("openings", "statements", "acknowledgements", "requests", "summaries", "turns", "questions")


@dataclass(frozen=True)
class Conversation:
    """What was drawn.

    Attributes:
        code: the digits.
        subject, wording: numbers of the subject and of the way in which the code is stated.
        drawn: the number of each other entry, by its list; `turns` and `later` are those of T3 and T4.
    """

    code: str
    subject: int
    wording: int
    drawn: dict[str, int]

    def transcript(self) -> Transcript:
        """The conversation; `code` is a part of T2, and `answer` the same digits in `ask`."""
        lists = shipped_entries(GRAMMAR)
        words = {"subject": lists["subjects"][self.subject], "noun": lists["nouns"][self.drawn["nouns"]]}

        def worded(text: str) -> str:
            said = text.replace("{noun}", words["noun"]).replace("{subject}", words["subject"])
            return said[0].upper() + said[1:]

        texts = {name: lists[name][self.drawn[name]] for name in WORDED if name != "statements"}
        question, answer = map(worded, texts["questions"])
        return talk(
            ("system", SYSTEM),
            ("T1", *texts["openings"]),
            (
                "T2",
                filled(worded(lists["statements"][self.wording]), "code", self.code, "code"),
                worded(texts["acknowledgements"]),
            ),
            ("summary", texts["requests"], worded(texts["summaries"])),
            ("T3", *texts["turns"]),
            ("T4", *lists["turns"][self.drawn["later"]]),
            ("ask", question, filled(answer, "code", self.code, "answer")[:2]),
        )


def draw(codes: Sequence[str], rng: np.random.Generator, held_out: HeldOut | None = None) -> list[Conversation]:
    """A random conversation for each code.

    Args:
        held_out: makes test conversations, in which each new way of stating the code (or each subject, where these
            alone are new) comes equally often; None for conversations that readers are trained on.
    """
    new_words, new_subjects = held_out in ("wording", "both"), held_out in ("subject", "both")
    counted = None if held_out is None else "subjects" if held_out == "subject" else "statements"

    def numbers(name: str, new: bool) -> list[int]:
        entries = len(shipped_entries(GRAMMAR)[name])
        first, last = (seen(entries), entries) if new else (0, seen(entries))
        if name == counted:
            return [first + place % (last - first) for place in range(len(codes))]
        return rng.integers(first, last, len(codes)).tolist()

    lists = [("subjects", new_subjects), ("nouns", False), *((name, new_words) for name in WORDED)]
    columns = {name: numbers(name, new) for name, new in lists}
    columns["later"] = numbers("turns", new_words)
    subjects, wordings = columns.pop("subjects"), columns.pop("statements")
    return [
        Conversation(code, subjects[place], wordings[place], {name: column[place] for name, column in columns.items()})
        for place, code in enumerate(codes)
    ]


def draw_shared(codes: Sequence[str], contexts: int, rng: np.random.Generator) -> list[Conversation]:
    """A few random conversations, each with many of the codes, in turn: as in Memento, whose probes were tested on
    contexts that they were trained on, with other codes."""
    few = draw(codes[:contexts], rng)
    return [replace(few[place % contexts], code=code) for place, code in enumerate(codes)]


def random_codes(count: int, rng: np.random.Generator, length: int = CODE_LENGTH) -> list[str]:
    """So many different codes of so many digits."""
    return [f"{number:0{length}d}" for number in rng.permutation(10**length)[:count]]


def seen(entries: int) -> int:
    """How many entries of a list training conversations are drawn from."""
    return round(SEEN * entries)
