"""Measures the models `steps` for their card: `python models/measure_steps.py MODEL...` prints its table.

What is said is the model's own greedy answer, not a teacher-forced one, and counts only if all of it is right.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from kvprobe.inference.model import Model, load
from kvprobe.stats import newcombe, wilson
from kvprobe.tasks.steps import LONGEST, Problem, Step, draw_problem, draw_wrong, text_of
from kvprobe.wording import percent, points

COUNT, SEED = 300, 11


class Drafted(NamedTuple):
    """A problem, and its first steps without and with a wrong value, which is the last one stated."""

    problem: Problem
    wrong: tuple[Step, ...]
    given: int

    @property
    def right(self) -> tuple[Step, ...]:
        return self.problem.steps()

    def asked(self, draft: tuple[Step, ...], command: str) -> str:
        return f"{self.problem.question} {text_of(draft[: self.given])} {command}"


def drafted(count: int) -> list[Drafted]:
    """Problems of the longest kind, each with a wrong value at any step but the last."""
    rng, cases = np.random.default_rng(SEED), []
    for _ in range(count):
        problem, number = draw_problem(LONGEST, rng), int(rng.integers(LONGEST - 1))
        wrong = problem.steps({number: draw_wrong(problem.steps()[number].after, rng)})
        cases.append(Drafted(problem, wrong, number + 1))
    return cases


def answers(model: Model, cases: list[Drafted], ask: Callable[[Drafted], str], of: str) -> list[str]:
    """What the model answers to each."""
    talks = ([{"role": "user", "content": ask(case)}] for case in tqdm(cases, desc=of, unit="problem"))
    return [model.generate(talk, max_new_tokens=60).text for talk in talks]


def measured(model: Model, cases: list[Drafted]) -> dict[str, str]:
    """The rows of the card's table."""

    def share(hits: list[bool]) -> str:
        return percent(wilson(sum(hits), len(hits)))

    solved = answers(model, cases, lambda case: f"{case.problem.question} solve", "solve")
    reviewed = answers(model, cases, lambda case: case.asked(case.wrong, "review"), "review")
    continued = answers(model, cases, lambda case: case.asked(case.wrong, "continue"), "continue")
    sound = answers(model, cases, lambda case: case.asked(case.right, "continue"), "continue a right draft")
    waits, false_waits = ([said.startswith("wait") for said in group] for group in (continued, sound))
    pairs = list(zip(continued, cases, strict=True))
    return {
        "`solve`": share([said == text_of(case.right) for said, case in zip(solved, cases, strict=True)]),
        "`review` a wrong draft: all steps right": share(
            [said == text_of(case.right) for said, case in zip(reviewed, cases, strict=True)]
        ),
        "`continue` a wrong draft: hands the error on": share(
            [said == text_of(case.wrong[case.given :]) for said, case in pairs]
        ),
        "… says `wait`": share(waits),
        "… says `wait`, and then all from the wrong step on right": share(
            [said == f"wait {text_of(case.right[case.given - 1 :])}" for said, case in pairs]
        ),
        "`continue` a *right* draft: says `wait`": share(false_waits),
        "says `wait` more often after a wrong draft": points(
            newcombe(wilson(sum(waits), len(waits)), wilson(sum(false_waits), len(false_waits)))
        ),
    }


def main() -> None:
    cases = drafted(COUNT)
    columns = [measured(load(name), cases) for name in sys.argv[1:]]
    print("\n".join(f"| {row} | {' | '.join(column[row] for column in columns)} |" for row in columns[0]))


if __name__ == "__main__":
    main()
