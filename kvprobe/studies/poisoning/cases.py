"""The problems of a run, and how each is put to the model: a slip and what follows it, and histories with errors."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvprobe.inference.model import Model
from kvprobe.studies.poisoning import Config
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
from kvprobe.text.tokens import Tokens

HISTORY = 5
"""Steps before the one whose result is asked for; any number of them may be wrong."""
DRAFTS: tuple[Draft, ...] = ("sound", "slip")


@dataclass(frozen=True)
class Arm:
    """One way to go on from a draft.

    Attributes:
        prompt: what the model reads before it answers.
        delay: steps that stand between the slip and what is done about it.
    """

    name: str
    draft: Draft
    prompt: Tokens
    delay: int = LATER


def wording_of(model: Model) -> Wording:
    return Wording(model.tokenizer, model.name)


def slips(model: Model, config: Config) -> list[Slip]:
    """The problems of a run: for a language model, sums that never pass 9 or 0."""
    return [slip_of(model, config, number) for number in range(config.problems)]


def slip_of(model: Model, config: Config, number: int) -> Slip:
    """One of them."""
    slip = draw_slip(np.random.default_rng([config.seed, number]), wording_of(model).words)
    return slip if config.mistake == "random" else slip.stating(own_mistake(model, slip))


def own_mistake(model: Model, slip: Slip) -> int:
    """The wrong value that the model itself holds likeliest; in English, of those from which no sum passes 9 or 0."""
    wording = wording_of(model)

    def fits(value: int) -> bool:
        return value != slip.right and (wording.words or slip.problem.steps({SLIPPED: value})[-1].within)

    asked = wording.chat(wording.question(slip.problem))
    text = wording.stated(slip.problem.steps()[: SLIPPED + 1])
    ids = {value: wording.ids(f"{text[:-1]}{value}") for value in range(BASE)}
    read = asked + Tokens.of(ids[0][:-1], "answer", asked.following)
    logits = model.extend(None, [read])[1][0, -1]
    return max(filter(fits, ids), key=lambda value: float(logits[ids[value][-1]]))


def stated(slip: Slip, draft: Draft) -> tuple[Step, ...]:
    """The steps that all arms begin with: those of the draft, and the ones on other registers."""
    return (*slip.drafts[draft][1], *slip.later)


def arms(wording: Wording, slip: Slip) -> list[Arm]:
    """Every way to go on, from a sound draft and from one with the slip."""
    problem, right = slip.problem, slip.problem.steps()[SLIPPED]
    question = wording.question(problem)
    asked = wording.chat(question)

    def answering(name: str, draft: Draft, text: str, delay: int = LATER) -> Arm:
        """The model goes on with its own answer."""
        return Arm(name, draft, asked + wording.after(asked, "answer", text), delay)

    ways: list[Arm] = []
    for draft in DRAFTS:
        steps = stated(slip, draft)
        own = wording.steps(steps)
        ways.append(answering("continue", draft, own))
        if wording.words:
            ways.append(answering("at once", draft, wording.stated(steps[: SLIPPED + 1]), 0))
        for delay in range(LATER + 1):
            ways.append(answering("wait", draft, wording.taken_back(steps[: SLIPPED + 1 + delay]), delay))
        ways += [
            Arm("ordered", draft, wording.chat(question, own, wording.order("continue"))),
            Arm("review", draft, wording.chat(question, own, wording.order("review"))),
            Arm("erratum", draft, wording.chat(question, own, wording.erratum(right))),
            Arm("handed", draft, wording.chat(wording.handed(problem, steps, "continue"))),
            Arm("other's", draft, wording.chat(wording.handed(problem, steps, "review"))),
        ]
    return [*ways, Arm("fresh", "slip", asked)]


def single(problem: Problem, values: Mapping[str, int], number: int) -> Problem:
    """One step of a problem as a problem of its own, with the values that the registers have before it."""
    return Problem(tuple(values[register] for register in REGISTERS), (problem.operations[number],))


@dataclass(frozen=True)
class History:
    """Steps of which some are wrong, and one more on a register of its own, which does not depend on them."""

    problem: Problem
    steps: tuple[Step, ...]
    wrong: int

    @property
    def asked(self) -> Step:
        """The step whose result is asked for."""
        return self.problem.steps()[-1]


def histories(rng: np.random.Generator, wraps: bool) -> list[History]:
    """One problem with 0, 1, … wrong steps before the last, drawn anew each."""
    last, *others = rng.permutation(REGISTERS).tolist()
    while True:
        registers = [*rng.choice(others, HISTORY).tolist(), last]
        problem = on_registers(registers, draw_problem(len(registers), rng))
        if wraps or all(step.within for step in problem.steps()):
            return [_history(problem, count, rng, wraps) for count in range(HISTORY + 1)]


def _history(problem: Problem, count: int, rng: np.random.Generator, wraps: bool) -> History:
    while True:
        places = set(rng.permutation(HISTORY)[:count].tolist())
        wrong: dict[int, int] = {}
        for place in sorted(places):
            wrong[place] = draw_wrong(problem.operations[place].of(problem.steps(wrong)[place].before), rng)
        steps = problem.steps(wrong)
        if wraps or all(step.within for place, step in enumerate(steps) if place not in places):
            return History(problem, steps[:-1], count)
