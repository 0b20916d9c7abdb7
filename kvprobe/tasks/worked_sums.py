"""Sums of registers with an early mistake: in the words of the models `steps`, or in English."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kvprobe.tasks.steps import (
    BASE,
    LATER,
    REGISTERS,
    SLIPPED,
    Draft,
    Problem,
    Slip,
    Step,
    draw_problem,
    draw_slip,
    draw_wrong,
    on_registers,
)
from kvprobe.tasks.worded_steps import Wording
from kvprobe.tasks.worked_answers import DRAFTS, HISTORY, Answering, Chances, Continuation, History, Rest, Shown
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import question_and_answer

WAITED = 1
"""Steps after the slip at which “wait” is tried for the answer; the models `steps` take errors back within two."""


def draw_sum(wording: Wording, rng: np.random.Generator) -> "WorkedSum":
    """A random sum with a slip to any other digit; for a language model, one that never passes 9 or 0."""
    return WorkedSum(wording, draw_slip(rng, wording.words))


@dataclass(frozen=True)
class WorkedSum:
    """Seven steps on three registers, of which the third states a wrong value and the last starts from it."""

    wording: Wording
    slip: Slip

    @cached_property
    def asked(self) -> Tokens:
        return self.wording.chat(self.question)

    @property
    def question(self) -> str:
        return self.wording.question(self.slip.problem)

    def stated(self, draft: Draft) -> tuple[Step, ...]:
        """The steps that all arms begin with: those of the draft, and the ones on other registers."""
        return (*self.slip.drafts[draft][1], *self.slip.later)

    def own_mistake(self, chances: Chances, rng: np.random.Generator) -> "WorkedSum":
        """In English, the wrong value is one from which no sum passes 9 or 0."""
        wording, slip = self.wording, self.slip

        def fits(value: int) -> bool:
            return value != slip.right and (wording.words or slip.problem.steps({SLIPPED: value})[-1].within)

        text = wording.stated(slip.problem.steps()[: SLIPPED + 1])
        values = list(filter(fits, range(BASE)))
        likely = chances(self.asked, [wording.ids(f"{text[:-1]}{value}") for value in values])
        return replace(self, slip=slip.stating(int(rng.choice(values, p=likely))))

    def drafts(self) -> Mapping[Draft, Tokens]:
        return self.wording.drafts(self.slip)

    def rest(self) -> Rest:
        """The steps on other registers; the beginning of the last one is read."""
        suffix, right, wrong = self.wording.suffix(self.slip, self.drafts()["sound"])
        written = len(self.wording.ids(self.wording.steps(self.slip.later)))
        return Rest(suffix[:written], suffix[written:], right, wrong)

    def arms(self) -> list[Continuation]:
        wording, problem, question = self.wording, self.slip.problem, self.question

        def answering(name: str, draft: Draft, text: str, delay: int = LATER, main: bool = True) -> Continuation:
            """The model goes on with its own answer."""
            return Continuation(name, draft, self.asked + wording.after(self.asked, "answer", text), delay, main)

        ways: list[Continuation] = []
        for draft in DRAFTS:
            steps = self.stated(draft)
            answer = wording.steps(steps)
            ways.append(answering("continue", draft, answer))
            if wording.words:
                ways.append(answering("at once", draft, wording.stated(steps[: SLIPPED + 1]), 0))
            for delay in range(LATER + 1):
                text = wording.taken_back(steps[: SLIPPED + 1 + delay])
                ways.append(answering("wait", draft, text, delay, main=delay == WAITED))
            talks = {
                "ordered": wording.chat(question, answer, wording.order("continue")),
                "review": wording.chat(question, answer, wording.order("review")),
                "erratum": wording.chat(question, answer, wording.erratum(problem.steps()[SLIPPED])),
                "handed": wording.chat(wording.handed(problem, steps, "continue")),
                "other's": wording.chat(wording.handed(problem, steps, "review")),
            }
            ways += [Continuation(name, draft, prompt, LATER) for name, prompt in talks.items()]
        return [*ways, Continuation("fresh", "slip", self.asked, LATER)]

    def outcome(self, text: str) -> dict[str, float]:
        steps, right = self.wording.read(text), self.slip.problem.steps()
        wrong = self.slip.problem.steps({SLIPPED: self.slip.wrong})
        last = [step.after for step in steps if step.operation == right[-1].operation][-1:]
        return {
            "right": float(last == [right[-1].after]),
            "handed_on": float(last == [wrong[-1].after]),
            "ends": float(bool(last)),
            "restated": float(right[SLIPPED] in steps),
            "local": float(np.mean([step.adds_up for step in steps])) if steps else np.nan,
        }

    def alone(self, answer: Answering, draft: Draft) -> dict[str, float]:
        """The third step, as the draft states it, is reviewed, and all others are asked for."""
        wording, problem = self.wording, self.slip.problem
        values: dict[str, int] = dict(zip(REGISTERS, problem.starts, strict=True))
        for number in range(len(problem.operations)):
            one = single(problem, values, number)
            given = self.slip.drafts[draft][1][SLIPPED]
            text = wording.handed(one, [given], "review") if number == SLIPPED else wording.question(one)
            steps = wording.read(answer(wording.chat(text)))
            (asked,) = one.operations
            said = [step.after for step in steps if step.operation == asked]
            if not said:
                return {"right": 0.0, "ends": 0.0}
            values[asked.register] = said[-1]
        last = problem.steps()[-1]
        return {"right": float(values[last.operation.register] == last.after), "ends": 1.0}

    def histories(self, rng: np.random.Generator) -> list[History]:
        """Steps on two registers, of which some are wrong, and the same one on the third."""
        wording, histories = self.wording, []
        for problem, steps, wrong in with_errors(rng, wording.words):
            asked = wording.chat(wording.question(problem))
            answer = wording.after(asked, "answer", wording.stated([*steps, problem.steps()[-1]]))
            histories.append(History(wrong, asked + answer[:-1], (answer.ids[-1],)))
        return histories

    def shown(self) -> Shown:
        written, slip = self.wording.steps, self.slip
        chat = question_and_answer(self.question, written(self.stated("slip")).strip())
        return Shown(chat, written(slip.drafts["slip"][1][SLIPPED:]).strip(), str(slip.right), str(slip.wrong))

    def remarked(self, draft: Draft) -> tuple[Tokens, list[int]]:
        """The question and a draft with the steps on other registers, where all before stand as `ok`; and which tokens
        of the answer the remarks on the third step and on each later one are predicted from."""
        steps = self.stated(draft)
        answer = self.wording.after(self.asked, "answer", self.wording.stated(steps))
        # A remark is predicted at the value before it; each step and its remark are as many words.
        length = (len(answer) + 1) // len(steps)
        return self.asked + answer, [(number + 1) * length - 2 for number in range(SLIPPED, len(steps))]


def single(problem: Problem, values: Mapping[str, int], number: int) -> Problem:
    """One step of a problem as a problem of its own, with the values that the registers have before it."""
    return Problem(tuple(values[register] for register in REGISTERS), (problem.operations[number],))


def with_errors(rng: np.random.Generator, wraps: bool) -> list[tuple[Problem, tuple[Step, ...], int]]:
    """One problem with 0, 1, … wrong steps, drawn anew each, before a last one on a register that they do not touch."""
    last, *others = rng.permutation(REGISTERS).tolist()
    while True:
        registers = [*rng.choice(others, HISTORY).tolist(), last]
        problem = on_registers(registers, draw_problem(len(registers), rng))
        if wraps or all(step.within for step in problem.steps()):
            return [(problem, _with_errors(problem, count, rng, wraps), count) for count in range(HISTORY + 1)]


def _with_errors(problem: Problem, count: int, rng: np.random.Generator, wraps: bool) -> tuple[Step, ...]:
    while True:
        places = set(rng.permutation(HISTORY)[:count].tolist())
        wrong: dict[int, int] = {}
        for place in sorted(places):
            wrong[place] = draw_wrong(problem.operations[place].of(problem.steps(wrong)[place].before), rng)
        steps = problem.steps(wrong)
        if wraps or all(step.within for place, step in enumerate(steps) if place not in places):
            return steps[:-1]
