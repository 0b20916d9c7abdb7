"""First answers, right and wrong, of the model's own and planted; and what is said after them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvprobe.studies.code_poisoning.answers import Answer, judged
from kvprobe.studies.code_poisoning.coder import FENCE, Coder, Prompt, without
from kvprobe.studies.code_poisoning.tasks import FORM, Bug, CodeTask, Function
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

Kind = Literal["own wrong", "own right", "planted", "sound"]
WRONG: tuple[Kind, ...] = ("own wrong", "planted")
REVIEW = f"Review this function and fix it. {FORM}"
CRITIQUE = (
    "Review this function: say what is wrong with it, if anything is. Then write it again, fixed, in a code block."
)
SUSPECT = "Is there a bug in this function? Answer yes or no."
PART = "part"
"""The segment of what may be wrong: a line, or a whole answer of the model's own."""


@dataclass(frozen=True)
class Draft:
    """A first answer.

    Attributes:
        parts: its text before the part that may be wrong, this part, and what follows.
        answer: the same, run.
    """

    kind: Kind
    task: CodeTask
    parts: tuple[str, str, str]
    answer: Answer

    @classmethod
    def own(cls, kind: Kind, task: CodeTask, text: str, answer: Answer) -> "Draft":
        """An answer that the model gave."""
        return cls(kind, task, ("", text, ""), answer)

    @classmethod
    def written(cls, kind: Kind, task: CodeTask, bug: Bug, answer: Answer) -> "Draft":
        """The solution of a task, with the bug or, as `sound`, without it."""
        lines = (bug.code if kind == "planted" else task.whole.code).splitlines(keepends=True)
        before, after = "".join(lines[: bug.line]), "".join(lines[bug.line + 1 :])
        return cls(kind, task, (f"{FENCE}python\n{before}", lines[bug.line], f"{after}{FENCE}"), answer)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def conversation(self, coder: Coder, ask: str) -> Tokens:
        """The task, this answer, and what the user says then; what may be wrong is the segment `PART`."""
        contents = [
            self.task.whole.question,
            [
                {"text": text, "name": name} if name else text
                for text, name in zip(self.parts, ("", PART, ""), strict=True)
                if text
            ],
            ask,
        ]
        return talk(coder, contents).divided(PART)

    def arms(self, coder: Coder, other: Function) -> Iterator[tuple[str, Function, Prompt]]:
        """Each way to go on: its name, the function that is asked for, and what is read.

        Args:
            other: a function that has nothing to do with this one.
        """
        whole = self.task.whole
        review = coder.prompt(self.conversation(coder, REVIEW), whole)
        yield "review", whole, review
        yield "critique", whole, Prompt(self.conversation(coder, CRITIQUE))
        yield "masked", whole, Prompt(review.tokens, review.lead, PART)
        yield "recomputed", whole, without(review, PART)
        yield "other's", whole, coder.asked(whole, handed(whole, self.text))
        yield "next", other, coder.prompt(self.conversation(coder, other.question), other)
        if self.kind in WRONG:
            report = reported(whole, self.answer)
            yield "failing", whole, coder.prompt(self.conversation(coder, f"{report} Fix the function. {FORM}"), whole)
            yield "warned", whole, coder.asked(whole, warned(whole, self.answer))


def talk(coder: Coder, contents: Sequence[object]) -> Tokens:
    """A conversation up to the answer, of messages that may have named parts."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    names = [f"{turn['role']} {number // 2}" for number, turn in enumerate(turns)]
    return Transcript.from_messages(turns, names).tokens(coder.turns.tokenizer, generation_prompt=True)


def handed(function: Function, text: str, ask: str = REVIEW) -> str:
    """What a user says who hands over what somebody else wrote."""
    return f"Somebody was given this task:\n{function.question}\n\nThe answer was:\n{text}\n\n{ask}"


def warned(function: Function, answer: Answer) -> str:
    """The task again, with what a first answer got wrong, but not the answer."""
    return f"{function.question}\n\nA first answer was wrong. {reported(function, answer)}"


def reported(function: Function, answer: Answer) -> str:
    """The first test that fails, as a user would report it."""
    if not answer.code:
        return f"The tests fail: there is no function {function.name}."
    cases = zip(function.tests, answer.outcomes, function.expected, strict=True)
    test, outcome, expected = next(case for case in cases if case[1] != case[2])
    did = f"fails with {outcome[1:-1]}" if outcome.startswith("<") else f"returns {outcome}"
    return f"The tests fail: {function.name}({test}) {did}, but {expected} is right."


def drafts_of(task: CodeTask, drawn: Sequence[str], rng: np.random.Generator) -> list[Draft]:
    """The first wrong and the first right answer that was drawn, if any; a planted bug, and the same without it."""
    answers = judged(task.whole, drawn)
    own: dict[bool, Draft] = {}
    for text, answer in zip(drawn, answers, strict=True):
        if answer.code:
            kind: Kind = "own right" if answer.right else "own wrong"
            own.setdefault(answer.right, Draft.own(kind, task, text, answer))
    bug = task.bugs[int(rng.integers(len(task.bugs)))]
    codes = [f"{FENCE}python\n{code}{FENCE}" for code in (bug.code, task.whole.code)]
    planted, sound = judged(task.whole, codes)
    written = [Draft.written("planted", task, bug, planted), Draft.written("sound", task, bug, sound)]
    return [*own.values(), *written]
