"""What the poisoning study asks of a problem: drafts with and without a slip, ways to go on, and earlier errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from kvprobe.inference.model import Model
from kvprobe.tasks.steps import Draft
from kvprobe.text.tokens import Tokens

HISTORY = 5
"""What was worked before the step whose result is asked for; any number of it may be wrong."""
DRAFTS: tuple[Draft, ...] = ("sound", "slip")


@dataclass(frozen=True)
class Arm:
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
    """A problem as a page shows it.

    Attributes:
        answer: the draft with the slip.
        marked: the wrong step within it.
    """

    question: str
    answer: str
    marked: str
    right: str
    wrong: str


@runtime_checkable
class Case(Protocol):
    """A problem with a slip, as it is put to one model."""

    def drafts(self) -> Mapping[Draft, Tokens]:
        """The question and the answer up to the step that may be wrong, in the segments `EARLIER` and `STEP`."""
        ...

    def rest(self) -> Rest: ...

    def arms(self) -> Sequence[Arm]:
        """Every way to go on, from a sound draft and from one with the slip."""
        ...

    def outcome(self, text: str) -> Mapping[str, float]:
        """Of an answer: whether its last value is right, the one that follows from the slip, or there at all; whether
        it states the wrong step again, rightly; and the share of its steps that follow from what they start from."""
        ...

    def alone(self, model: Model, draft: Draft, new: int) -> Mapping[str, float]:
        """Whether the last value is right, or there at all, where steps are worked in conversations of their own."""
        ...

    def histories(self, rng: np.random.Generator) -> Sequence[History]:
        """The same step after 0, 1, … wrong ones."""
        ...

    def shown(self) -> Shown: ...


def chances(model: Model, before: Tokens, endings: Sequence[Sequence[int]]) -> list[float]:
    """How likely each ending is of these, which differ in one token or more: by the first token that differs."""
    place = next(at for at, ids in enumerate(zip(*endings, strict=False)) if len(set(ids)) > 1)
    read = before + Tokens.of(endings[0][:place], "answer", before.following)
    logits = model.extend(None, [read])[1][0, -1].float()
    return torch.softmax(logits[[ids[place] for ids in endings]].double(), -1).tolist()
