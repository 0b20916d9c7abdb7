"""An answer in steps that states a wrong value early on, as it is put to a model.

There are drafts with and without the slip, ways to go on from them, and earlier answers of which some are wrong.
`kvprobe.tasks.worked_sums` has such answers. A model is asked through functions that the caller gives: `Answering` and
`Chances`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kvprobe.tasks.steps import Draft
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

Answering = Callable[[Tokens], str]
"""What a model answers to a prompt."""
Chances = Callable[[Tokens, Sequence[Sequence[int]]], Sequence[float]]
"""How likely a model finds each of some endings of a text, as shares of all; `kvprobe.inference.forced.chances`."""

HISTORY = 5
"""What was worked before the step whose result is asked for; any number of it may be wrong."""
DRAFTS: tuple[Draft, ...] = ("sound", "slip")


@dataclass(frozen=True)
class Continuation:
    """One way to go on from a draft.

    Attributes:
        prompt: what the model reads before it answers.
        delay: steps that stand between the slip and what is done about it.
        main: whether it stands for its name, of which others only have another delay.
    """

    name: str
    draft: Draft
    prompt: Tokens
    delay: int
    main: bool = True


@dataclass(frozen=True)
class Rest:
    """What stands between a draft and the prediction of the value that it states.

    Attributes:
        later: what is written into the cache, the same after all drafts.
        lead: what is read from it.
        right, wrong: the tokens that the prediction chooses from.
    """

    later: Tokens
    lead: Tokens
    right: int
    wrong: int


@dataclass(frozen=True)
class History:
    """Work of which a part is wrong, and a step that does not depend on it.

    Attributes:
        wrong: how many of the `HISTORY` parts are.
        prompt: up to the step's result.
        result: the tokens of the right one.
    """

    wrong: int
    prompt: Tokens
    result: tuple[int, ...]


@dataclass(frozen=True)
class Shown:
    """A problem to look at.

    Attributes:
        chat: the question, and the draft with the slip.
        marked: the wrong step within it.
    """

    chat: Transcript
    marked: str
    right: str
    wrong: str


@runtime_checkable
class WorkedAnswer(Protocol):
    """A problem, and its answer with a slip."""

    def own_mistake(self, chances: Chances, rng: np.random.Generator) -> "WorkedAnswer":
        """The same problem with a slip that a model itself would make: the wrong value is drawn by its own chances."""
        ...

    def drafts(self) -> Mapping[Draft, Tokens]:
        """The question and the answer up to the step that may be wrong, in the segments `EARLIER` and `STEP`."""
        ...

    def rest(self) -> Rest: ...

    def arms(self) -> Sequence[Continuation]:
        """Every way to go on, from a sound draft and from one with the slip."""
        ...

    def outcome(self, text: str) -> Mapping[str, float]:
        """Of an answer: whether its last value is right, the one that follows from the slip, or there at all; whether
        it states the wrong step again, rightly; and the share of its steps that follow from what they start from."""
        ...

    def alone(self, answer: Answering, draft: Draft) -> Mapping[str, float]:
        """Whether the last value is right, or there at all, where steps are worked in conversations of their own."""
        ...

    def histories(self, rng: np.random.Generator) -> Sequence[History]:
        """The same step after 0, 1, … wrong ones."""
        ...

    def shown(self) -> Shown: ...
