"""Worked solutions: reading them, what follows from a wrong value, and problems that are refused or left out."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from kvprobe.studies.poisoning.solutions import (
    BEADS,
    WorkedProblem,
    computed,
    draw_beads,
    equations_in,
    numbers_in,
    shown,
    worked_problems,
)
from tests.refusals import refused

FEED = WorkedProblem(
    "Many hens eat 3 cups a day each. In the morning they get 15 cups, at noon 25. How many are left?",
    (
        "They need 3*21=<<3*21=63>>63 cups a day.",
        "The morning and noon are not the end.",
        "The last meal takes 63-15-25=$<<63-15-25=23>>23, or 23 cups.",
    ),
    "23",
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*20", 60),
        ("60 - 15-25", 20),
        ("1,000 / 8", 125),
        ("$2 x 5", 10),
        (".5*30", 15),
        ("(2+3)*4", 20),
        ("-(2)+3", 1),
        ("05+1", 6),
        ("2/3", Fraction(2, 3)),
        ("2**9", None),
        ("1/0", None),
        ("40%", None),
        ("a+1", None),
        ("", None),
        ("9" * 300, None),
        ("(" * 150 + "1" + ")" * 49, None),
    ],
)
def test_sums_and_products_of_numbers_are_computed_and_nothing_else(expression: str, value: Fraction | int | None):
    assert computed(expression) == value


def test_numbers_and_equations_are_read_from_text():
    assert numbers_in("1,000 beads at $2.50, .5 of them; 3 and 12.") == [1000, 2.5, 0.5, 3, 12]
    text = "She has 3 + 4 = 7, pays $2 x 5 = $11, and 1,000 * 2 = 2,000. So a = 5. 3\n4-1=3 = 3; 3-8=-5"
    assert equations_in(text) == [(7, 7), (10, 11), (2000, 2000), (3, 3), (-5, -5)]


def test_a_wrong_value_is_carried_on_to_the_answer():
    place = FEED.slip
    assert place is not None
    assert (place.line, place.right, place.user, place.lead) == (0, "63", 2, "The last meal takes ")
    then = FEED.following(place, "73")
    assert then is not None
    assert then.lines == (
        "They need 3*21=73 cups a day.",
        "The morning and noon are not the end.",
        "The last meal takes 73-15-25=$33, or 33 cups.",
    )
    assert then.answer == "33"
    sound = FEED.following(place, "63")
    assert sound is None or sound.lines == tuple(map(shown, FEED.lines))


def test_wrong_values_differ_in_one_digit_and_lead_to_other_answers():
    place = FEED.slip
    assert place is not None
    wrongs = FEED.wrongs(place)
    assert {at for at, _ in wrongs} == {0, 1}
    for at, wrong in wrongs:
        assert [one != other for one, other in zip(wrong, place.right, strict=True)].index(True) == at
        assert sum(one != other for one, other in zip(wrong, place.right, strict=True)) == 1
        then = FEED.following(place, wrong)
        assert then is not None
        assert then.answer != FEED.answer
        assert wrong not in ("15", "25", "23")
        assert not wrong.startswith("0")
    assert "33" not in [wrong for _, wrong in wrongs]  # the last meal would take less than nothing


@pytest.mark.parametrize(
    ("question", "lines", "answer"),
    [
        ("How many?", ("It is 3*20=<<3*20=60>>60.",), "60"),  # no later line
        ("Of 60?", ("It is 3*20=<<3*20=60>>60.", "So it is 60-1=<<60-1=59>>59."), "59"),  # the question states it
        ("How many?", ("It is 3*20=<<3*20=61>>61.", "So it is 61-1=<<61-1=60>>60."), "60"),  # does not add up
        ("How many?", ("It is 3*20=<<3*20=60>>60.", "So it is 60-1=<<60-1=59>>59."), "7"),  # the answer is another
        ("How many?", ("It is 3*20=<<3*20=60>>60.", "60-1=<<60-1=59>>59."), "59"),  # nothing stands before it
    ],
)
def test_a_value_whose_consequences_are_not_known_is_left_out(question: str, lines: tuple[str, ...], answer: str):
    assert WorkedProblem(question, lines, answer).slip is None


def test_a_value_that_a_line_needs_without_naming_it_is_passed_over():
    lines = ("It is 3*2=<<3*2=6>>6.", "That is <<6*2=12>>12.", "So 6+12=<<6+12=18>>18.")
    place = WorkedProblem("How many?", lines, "18").slip
    assert place is not None
    assert (place.line, place.right) == (1, "12")


@pytest.mark.parametrize("seed", range(5))
def test_drawn_problems_add_up_and_have_a_line_that_needs_nothing(seed: int):
    problem = draw_beads(np.random.default_rng(seed))
    place = problem.slip
    assert place is not None
    assert (place.line, place.user, len(problem.lines)) == (0, 2, 3)
    assert all(left == right for line in problem.lines for left, right in equations_in(shown(line)))
    assert shown(problem.lines[-1]).split("= ")[1].startswith(problem.answer)


def solved(path: Path, count: int) -> str:
    entry = {"question": FEED.question, "answer": "\n".join(FEED.lines) + f"\n#### {FEED.answer}"}
    plain = {"question": "How many?", "answer": "None of them.\n#### 0"}
    # 60 may be minutes, so what follows from another value is not known.
    constant = {key: text.replace("21", "20").replace("63", "60").replace("23", "20") for key, text in entry.items()}
    path.write_text("\n".join(map(json.dumps, [entry, plain, constant] * count)), encoding="utf-8")
    return f"gsm8k:{path}"


def test_problems_of_a_file_are_those_in_which_a_value_may_be_wrong(tmp_path: Path):
    source = solved(tmp_path / "mine.jsonl", 3)
    assert worked_problems(source, 2, seed=0) == [FEED, FEED]
    refused(lambda: worked_problems(source, 4, seed=0), "in 3 of its solutions it is known")
    (tmp_path / "none.jsonl").write_text('{"question": "a", "answer": "b"}')
    refused(lambda: worked_problems(f"gsm8k:{tmp_path}/none.jsonl", 1, seed=0), "line 1", "does not end in '#### '")
    refused(lambda: worked_problems("pearls", 1, seed=0), "There are no worked problems 'pearls'")
    assert worked_problems(BEADS, 2, seed=1)[:1] == worked_problems(BEADS, 1, seed=1)
