"""Word problems with worked solutions that state a wrong value early on, for language models."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from kvprobe.errors import UserError
from kvprobe.studies.poisoning.solutions import (
    SlipPlace,
    WorkedProblem,
    equations_in,
    number_of,
    numbers_in,
    shown,
)
from kvprobe.tasks.gsm8k import REQUEST
from kvprobe.tasks.steps import Draft
from kvprobe.tasks.worded_steps import EARLIER, LATER_STEPS, STEP
from kvprobe.tasks.worked_answers import DRAFTS, HISTORY, Answering, Chances, Continuation, History, Rest, Shown
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns, as_long, question_and_answer

END = "end with a last line of the form '#### <number>'."
GO_ON = f"Go on from there with the steps that are left, and {END}"
REVIEW = f"Check this solution. Then write the whole solution again, without mistakes, and {END}"
REVIEW_LINE = "Check the last line. Then write it again, without mistakes."
"""What a user asks for."""

_ANSWER = re.compile(r"#### *\$?(-?[\d,]*\.?\d+)")


def draw_solution(
    turns: Turns, problems: Sequence[WorkedProblem], examples: int, rng: np.random.Generator
) -> "WorkedSolution":
    """The first problem with a slip in one digit, to any other.

    Args:
        problems: that one, and others for examples and earlier exchanges.
        examples: worked problems that each conversation begins with.
    """
    problem, *others = problems
    return WorkedSolution(turns, problem, place_of(problem), drawn_wrong(problem, rng), tuple(others), examples)


@dataclass(frozen=True)
class WorkedSolution:
    """A problem whose solution states a wrong value that a later line starts from.

    Attributes:
        others: for examples and earlier exchanges.
        examples: how many of them each conversation begins with.
    """

    turns: Turns
    problem: WorkedProblem
    place: SlipPlace
    wrong: str
    others: tuple[WorkedProblem, ...]
    examples: int

    def own_mistake(self, chances: Chances, rng: np.random.Generator) -> "WorkedSolution":
        wrongs = self.problem.wrongs(self.place)
        at = rng.choice(sorted({digit for digit, _ in wrongs}))
        values = [wrong for digit, wrong in wrongs if digit == at]
        likely = chances(self.asked, [self.turns.ids(self.until + wrong) for wrong in values])
        return replace(self, wrong=str(rng.choice(values, p=likely)))

    # ---- texts

    @property
    def question(self) -> str:
        return asked_of(self.problem)

    def lines(self, draft: Draft) -> tuple[str, ...]:
        """The solution up to the line that starts from the value."""
        value = self.place.right if draft == "sound" else self.wrong
        return self._with(value)[: self.place.user]

    def _with(self, value: str) -> tuple[str, ...]:
        """The solution, with this value in its place; what follows from it is as in the sound one."""
        lines = [shown(line) for line in self.problem.lines]
        lines[self.place.line] = self.place.before + value + self.place.after
        return tuple(lines)

    @property
    def until(self) -> str:
        """The solution up to the value that may be wrong."""
        return written(self._with("")[: self.place.line]) + self.place.before

    # ---- tokens

    def chat(self, *texts: str) -> Tokens:
        examples = (text for other in self.others[: self.examples] for text in exchange(other))
        return self.turns.chat(*examples, *texts)

    @cached_property
    def asked(self) -> Tokens:
        return self.chat(self.question)

    def drafts(self) -> Mapping[Draft, Tokens]:
        drafts: dict[Draft, Tokens] = {}
        for draft in DRAFTS:
            tokens, lines = self.asked, self.lines(draft)
            for segment, part in ((EARLIER, lines[: self.place.line]), (STEP, lines[self.place.line :][:1])):
                tokens += self.turns.after(tokens, segment, written(part))
            drafts[draft] = tokens
        return as_long(drafts)

    def rest(self) -> Rest:
        """The lines up to where the value is needed; the last token before it is read."""
        between = written(self.lines("sound")[self.place.line + 1 :]) + self.place.lead
        both, right, wrong = parted(self.turns.ids(between + value) for value in (self.place.right, self.wrong))
        suffix = Tokens.of(both, LATER_STEPS, self.drafts()["sound"].following)
        return Rest(suffix[:-1], suffix[-1:], right[0], wrong[0])

    def arms(self) -> list[Continuation]:
        ways: list[Continuation] = []
        for draft in DRAFTS:
            lines, right = self.lines(draft), self.lines("sound")[self.place.line]
            answer, until = written(lines), written(lines[: self.place.line + 1])
            talks = {
                "continue": self.asked + self.turns.after(self.asked, "answer", answer),
                "wait": self.asked + self.turns.after(self.asked, "answer", f"{until}Wait,"),
                "ordered": self.chat(self.question, answer, GO_ON),
                "review": self.chat(self.question, answer, REVIEW),
                "erratum": self.chat(self.question, answer, f"One line is wrong; it should be: {right} {GO_ON}"),
                "handed": self.chat(self.handed(lines, GO_ON)),
                "other's": self.chat(self.handed(lines, REVIEW)),
            }
            ways += [Continuation(name, draft, prompt, 0) for name, prompt in talks.items()]
        return [*ways, Continuation("fresh", "slip", self.asked, 0)]

    def handed(self, lines: Sequence[str], order: str) -> str:
        """What a user says who hands over the first lines."""
        return f"{self.problem.question}\n\nThe solution so far:\n{written(lines)}\n{order}"

    # ---- answers

    def outcome(self, text: str) -> dict[str, float]:
        equations, value = equations_in(text), number_of(self.place.right)
        last, following = last_number(text), self.problem.following(self.place, self.wrong)
        return {
            "right": float(last is not None and last == number_of(self.problem.answer)),
            "handed_on": float(last is not None and following is not None and last == number_of(following.answer)),
            "ends": float(last is not None),
            "restated": float((value, value) in equations),
            "local": float(np.mean([left == right for left, right in equations])) if equations else np.nan,
        }

    def alone(self, answer: Answering, draft: Draft) -> dict[str, float]:
        """The line that may be wrong is reviewed, and then the solution handed over as far as it goes."""
        reviewed = self.lines(draft)[: self.place.line + 1]
        said = answer(self.chat(self.handed(reviewed, REVIEW_LINE)))
        stated = [right for _, right in equations_in(said)][-1:] or numbers_in(said)[-1:]
        if not stated:
            return {"right": 0.0, "ends": 0.0}
        lines = self._with(as_written(stated[0]))[: self.place.user]
        outcome = self.outcome(answer(self.chat(self.handed(lines, GO_ON))))
        return {name: outcome[name] for name in ("right", "ends")}

    # ---- earlier errors

    def histories(self, rng: np.random.Generator) -> list[History]:
        """Worked problems of which some end wrongly, and then this one up to the value, which does not need them."""
        both, right, _ = parted(self.turns.ids(self.until + value) for value in (self.place.right, self.wrong))
        histories = []
        for count in range(HISTORY + 1):
            places = set(rng.permutation(HISTORY)[:count].tolist())
            earlier = [
                exchange(other, drawn_wrong(other, rng) if place in places else None)
                for place, other in enumerate(self.others[:HISTORY])
            ]
            asked = self.turns.chat(*(text for pair in earlier for text in pair), self.question)
            histories.append(History(count, asked + Tokens.of(both, "answer", asked.following), tuple(right)))
        return histories

    def shown(self) -> Shown:
        lines = self.lines("slip")
        chat = question_and_answer(self.question, written(lines).strip())
        return Shown(chat, lines[self.place.line].strip(), self.place.right, self.wrong)


def place_of(problem: WorkedProblem) -> SlipPlace:
    assert problem.slip is not None  # `worked_problems` gives no other
    return problem.slip


def drawn_wrong(problem: WorkedProblem, rng: np.random.Generator) -> str:
    """One of the wrong values, all as likely."""
    wrongs = problem.wrongs(place_of(problem))
    return wrongs[rng.integers(len(wrongs))][1]


def asked_of(problem: WorkedProblem) -> str:
    return f"{problem.question}\n\n{REQUEST}"


def written(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def exchange(problem: WorkedProblem, wrong: str | None = None) -> tuple[str, str]:
    """A problem and its solution, as it goes on from a wrong value if there is one."""
    lines, answer = tuple(map(shown, problem.lines)), problem.answer
    if wrong is not None and problem.slip and (following := problem.following(problem.slip, wrong)):
        lines, answer = following.lines, following.answer
    return asked_of(problem), f"{written(lines)}#### {answer}"


def parted(texts: Iterable[list[int]]) -> tuple[list[int], list[int], list[int]]:
    """What two texts have in common, and how each goes on.

    Raises:
        UserError: they begin differently, or one ends where they part.
    """
    right, wrong = texts
    common = next((at for at, (one, other) in enumerate(zip(right, wrong, strict=False)) if one != other), 0)
    if not common:
        raise UserError("This tokenizer gives the right value and the wrong one no tokens that differ at one place.")
    return right[:common], right[common:], wrong[common:]


def last_number(text: str) -> Fraction | None:
    """The answer that a text gives in the form that was asked for."""
    said = _ANSWER.findall(text)
    return number_of(said[-1]) if said else None


def as_written(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"
