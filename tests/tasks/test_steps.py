"""Sums worked step by step: what follows from what, wrong values and what hands them on."""

import numpy as np
import pytest

from kvprobe.tasks.steps import (
    BASE,
    Operation,
    Problem,
    Step,
    draw_problem,
    draw_wrong,
    read_steps,
    text_of,
    vocabulary,
)
from tests.refusals import refused

PROBLEM = Problem((3, 7, 1), (Operation("a", "+", 4), Operation("b", "-", 9), Operation("a", "+", 5)))


def test_the_example_of_the_module_by_hand():
    assert PROBLEM.question == "a 3 b 7 c 1 : a + 4 b - 9 a + 5"
    assert text_of(PROBLEM.steps()) == "a 3 + 4 = 7 ok b 7 - 9 = 8 ok a 7 + 5 = 2 ok"


def test_a_wrong_value_is_handed_on_by_its_register_alone():
    wrong = PROBLEM.steps({0: 6})
    assert text_of(wrong) == "a 3 + 4 = 6 ok b 7 - 9 = 8 ok a 6 + 5 = 1 ok"
    assert [step.adds_up for step in wrong] == [False, True, True]


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_read_back_as_written(seed: int):
    rng = np.random.default_rng(seed)
    problem = draw_problem(6, rng)
    steps = problem.steps({2: draw_wrong(problem.steps()[2].after, rng)})
    assert read_steps(text_of(steps)) == steps
    taken_back = text_of(steps[:2]).removesuffix("ok")
    assert read_steps(f"{taken_back}wait {text_of(steps[1:])}") == steps[:2] + steps[1:]
    assert read_steps(f"wait {text_of(steps)}") == steps
    assert set(f"{problem.question} {text_of(steps)}".split()) <= set(vocabulary())
    values = dict(zip("abc", problem.starts, strict=True))
    for step in problem.steps():
        assert step.before == values[step.operation.register]
        values[step.operation.register] = eval(f"({step.before} {step.operation.sign} {step.operation.amount}) % 10")
        assert step.after == values[step.operation.register]


def test_text_that_is_no_step_ends_the_steps():
    assert read_steps("a 3 + 4 = 7 b 7 - 9") == (Step(Operation("a", "+", 4), 3, 7),)
    assert read_steps("a 3 + 4 = 77") == ()
    assert read_steps("a 3 + 4 = 7 okay b 7 - 9 = 8") == (Step(Operation("a", "+", 4), 3, 7),)
    assert read_steps("nonsense a 3 + 4 = 7") == ()


def test_wrong_values_are_any_other_digit():
    rng = np.random.default_rng(0)
    assert {draw_wrong(4, rng) for _ in range(200)} == set(range(BASE)) - {4}


def test_refusals():
    refused(lambda: PROBLEM.steps({3: 1}), "Step 3 cannot state 1")
    refused(lambda: PROBLEM.steps({0: 10}), "Step 0 cannot state 10")
    refused(lambda: Problem((1, 2), PROBLEM.operations), "starts from 3 digits")
    refused(lambda: Problem((1, 2, 3), (Operation("d", "+", 1),)), "d + 1 is no operation")
    refused(lambda: Problem((1, 2, 3), ()), "no operation")
