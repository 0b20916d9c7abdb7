"""Measures the models `steps` for their card: `python models/measure_steps.py MODEL...` prints its table.

What is said is the model's own greedy answer, not a teacher-forced one, and counts only if all of it is right.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from kvprobe.inference.model import Model, load
from kvprobe.stats import binomial, newcombe
from kvprobe.tasks.steps import LONGEST, Problem, Step, draw_problem, draw_wrong, text_of
from kvprobe.tasks.worded_steps import Wording
from kvprobe.text.tokens import Tokens
from kvprobe.wording import percent, points

COUNT, SEED = 300, 11
ROWS = 25
"""Answers at a time."""


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


def answers(model: Model, cases: list[Drafted], ask: Callable[[Drafted], Tokens], of: str) -> list[str]:
    """What the model answers to each."""
    prompts, texts = [ask(case) for case in cases], list[str]()
    for start in tqdm(range(0, len(prompts), ROWS), desc=of, unit="batch"):
        texts += model.generate(prompts[start : start + ROWS], max_new_tokens=120).texts
    return texts


def measured(model: Model, cases: list[Drafted]) -> dict[str, str]:
    """The rows of the card's table."""
    wording = Wording.of(model)

    def share(hits: list[bool]) -> str:
        return percent(binomial(sum(hits), len(hits)))

    def more(one: list[bool], other: list[bool]) -> str:
        return points(newcombe(binomial(sum(one), len(one)), binomial(sum(other), len(other))))

    def asked(words: Callable[[Drafted], str]) -> Callable[[Drafted], Tokens]:
        return lambda case: wording.chat(words(case))

    def answering(steps: Callable[[Drafted], tuple[Step, ...]]) -> Callable[[Drafted], Tokens]:
        """The model's own answer, up to the value of its last step so far."""

        def prompt(case: Drafted) -> Tokens:
            before = wording.chat(wording.question(case.problem))
            return before + wording.after(before, "answer", wording.stated(steps(case)[: case.given]))

        return prompt

    def took_back(texts: list[str]) -> list[bool]:
        return [text.startswith("wait") for text in texts]

    solved = answers(model, cases, asked(lambda case: wording.question(case.problem)), "solve")
    own_wrong = answers(model, cases, answering(lambda case: case.wrong), "its own wrong value")
    own_right = answers(model, cases, answering(lambda case: case.right), "its own right value")
    reviewed = answers(model, cases, asked(lambda case: case.asked(case.wrong, "review")), "review")
    continued = answers(model, cases, asked(lambda case: case.asked(case.wrong, "continue")), "continue")
    sound = answers(model, cases, asked(lambda case: case.asked(case.right, "continue")), "continue a right draft")
    pairs = list(zip(continued, cases, strict=True))
    on_wrong, on_right, waits, alarms = map(took_back, (own_wrong, own_right, continued, sound))
    return {
        "`solve`": share([said == text_of(case.right) for said, case in zip(solved, cases, strict=True)]),
        "its own wrong value: says `wait`": share(on_wrong),
        "… and then all from the wrong step on right": share(
            [
                said == f"wait {text_of(case.right[case.given - 1 :])}"
                for said, case in zip(own_wrong, cases, strict=True)
            ]
        ),
        "its own *right* value: says `wait`": share(on_right),
        "says `wait` more often at a wrong value": more(on_wrong, on_right),
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
        "`continue` a *right* draft: says `wait`": share(alarms),
        "says `wait` more often after a wrong draft": more(waits, alarms),
    }


def main() -> None:
    cases = drafted(COUNT)
    columns = [measured(load(name), cases) for name in sys.argv[1:]]
    print("\n".join(f"| {row} | {' | '.join(column[row] for column in columns)} |" for row in columns[0]))


if __name__ == "__main__":
    main()
