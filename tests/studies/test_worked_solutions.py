"""Worked solutions with an early mistake: how they are put to a language model, and how its answers are read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe.studies.poisoning.solutions import WorkedProblem, worked_problems
from kvprobe.studies.poisoning.worked_solutions import (
    WorkedSolution,
    draw_solution,
    exchange,
    last_number,
    parted,
    written,
)
from kvprobe.tasks.gsm8k import REQUEST
from kvprobe.tasks.worded_steps import EARLIER, LATER_STEPS, STEP
from kvprobe.tasks.worked_answers import DRAFTS, HISTORY
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns
from tests.refusals import refused

STRIPES = WorkedProblem(
    "A flag has 3 rows of 9 stars. 5 fell off, and 4 were painted over. How many stars can be seen?",
    (
        "First, all stars are counted.",
        "There are 3*9=<<3*9=27>>27 stars.",
        "Some of them fell off.",
        "So 27-5=<<27-5=22>>22 are left.",
        "And 22-4=<<22-4=18>>18 can be seen.",
    ),
    "18",
)


@pytest.fixture(scope="module")
def turns(smol_tokenizer: Any) -> Turns:
    return Turns(smol_tokenizer, "smollm2-135m")


def stripes(turns: Turns, wrong: str = "28", examples: int = 0) -> WorkedSolution:
    problems = [STRIPES, *worked_problems("beads", HISTORY, seed=0)]
    return replace(draw_solution(turns, problems, examples, np.random.default_rng(0)), wrong=wrong)


def text_of(turns: Turns, tokens: Tokens) -> str:
    return turns.tokenizer.decode(list(tokens.ids))


def test_drafts_differ_in_one_value_and_have_the_same_segments(turns: Turns):
    worked = stripes(turns)
    drafts = worked.drafts()
    for draft, value in zip(DRAFTS, ("27", "28"), strict=True):
        tokens = drafts[draft]
        assert text_of(turns, tokens[tokens.span(EARLIER)]) == "First, all stars are counted.\n"
        assert text_of(turns, tokens[tokens.span(STEP)]) == f"There are 3*9={value} stars.\n"
    sound, slip = (drafts[draft].ids for draft in DRAFTS)
    assert sum(one != other for one, other in zip(sound, slip, strict=True)) == 1
    rest = worked.rest()
    assert set(rest.later.segments) == {LATER_STEPS}
    assert text_of(turns, rest.later + rest.lead) == "Some of them fell off.\nSo 2"
    assert [turns.tokenizer.decode([token]) for token in (rest.right, rest.wrong)] == ["7", "8"]


def test_each_arm_puts_the_same_lines_in_its_own_way(turns: Turns):
    worked = stripes(turns, examples=1)
    answer = written(worked.lines("slip"))
    assert answer == "First, all stars are counted.\nThere are 3*9=28 stars.\nSome of them fell off.\n"
    texts = {(arm.name, arm.draft): text_of(turns, arm.prompt) for arm in worked.arms()}
    assert len(texts) == 2 * 7 + 1
    begun = text_of(turns, worked.asked)
    assert begun.count(REQUEST) == 2
    assert texts["fresh", "slip"] == begun
    assert texts["continue", "slip"] == begun + answer
    assert texts["wait", "slip"] == f"{begun}First, all stars are counted.\nThere are 3*9=28 stars.\nWait,"
    assert texts["continue", "sound"] == texts["continue", "slip"].replace("=28", "=27")
    for name in ("handed", "other's"):
        assert texts[name, "slip"].count(answer) == 1
        assert begun not in texts[name, "slip"]
    for name in ("ordered", "review", "erratum"):
        assert texts[name, "slip"].startswith(begun + answer.strip())
    assert "it should be: There are 3*9=27 stars." in texts["erratum", "slip"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 27-5=22 are left.\n22-4=18\n#### 18", (1, 0, 1, 0, 1)),
        ("So 28-5=23 are left.\n23-4=19\n#### 19", (0, 1, 1, 0, 1)),
        ("3*9=27, so 27-5=21. #### 15", (0, 0, 1, 1, 0.5)),
        ("18", (0, 0, 0, 0, None)),
        ("#### $18.", (1, 0, 1, 0, None)),
    ],
)
def test_answers_are_read_by_their_last_line(turns: Turns, text: str, expected: tuple[float | None, ...]):
    outcome = stripes(turns).outcome(text)
    local = outcome.pop("local")
    assert (*outcome.values(), None if np.isnan(local) else local) == expected


def test_worked_alone_the_line_is_reviewed_and_what_came_of_it_handed_over(turns: Turns):
    said = iter(["There are 3*9=27 stars.", "So 27-5=22.\n22-4=18\n#### 18"] + ["No idea."] * 2)
    asked: list[str] = []

    def answer(prompt: Tokens) -> str:
        asked.append(text_of(turns, prompt))
        return next(said)

    assert stripes(turns).alone(answer, "slip") == {"right": 1, "ends": 1}
    assert "There are 3*9=28 stars.\n" in asked[0]
    assert "So 2" not in asked[0]
    assert "There are 3*9=27 stars.\nSome of them fell off.\n" in asked[1]
    assert stripes(turns).alone(answer, "slip") == {"right": 0, "ends": 0}


def test_the_last_answer_counts():
    assert last_number("#### 3 and then #### 1,200") == 1200
    assert last_number("it is 5") is None


def test_earlier_exchanges_are_wrong_as_often_as_is_said_and_the_step_is_the_same(turns: Turns):
    worked = stripes(turns)
    histories = worked.histories(np.random.default_rng(1))
    for wrong, history in enumerate(histories):
        text = text_of(turns, history.prompt)
        assert history.wrong == wrong
        assert text.endswith("There are 3*9=2")
        assert text.count("#### ") == HISTORY + text.count("'#### <number>'")
        assert sum(exchange(other)[1] in text for other in worked.others) == HISTORY - wrong
        assert turns.tokenizer.decode(list(history.result)) == "7"


def test_own_mistakes_are_drawn_by_the_chances_that_a_model_gives_the_endings(turns: Turns):
    rng, given = np.random.default_rng(0), list[tuple[Tokens, Sequence[Sequence[int]]]]()

    def chances(before: Tokens, endings: Sequence[Sequence[int]]) -> list[float]:
        given.append((before, endings))
        return [float(number == 1) for number in range(len(endings))]

    worked = stripes(turns)
    own = [worked.own_mistake(chances, rng) for _ in range(10)]
    offered = [[turns.tokenizer.decode(ids).rpartition("=")[2] for ids in endings] for _, endings in given]
    assert {case.wrong for case in own} == {values[1] for values in offered}
    for values in offered:  # wrong in the same digit, so that they part at one token
        assert len({tuple(digit == right for digit, right in zip(value, "27", strict=True)) for value in values}) == 1
    assert all(case.wrong in {wrong for _, wrong in STRIPES.wrongs(case.place)} for case in own)
    assert {before for before, _ in given} == {worked.asked}


def test_texts_that_do_not_part_are_refused():
    assert parted([[1, 2, 3], [1, 4]]) == ([1], [2, 3], [4])
    refused(lambda: parted([[1], [2]]), "no tokens that differ at one place")
