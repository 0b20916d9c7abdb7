"""Sums with an early mistake: the problems, how they are put to a model, and how its answers are read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe.tasks.steps import LATER, SLIPPED, Draft, Slip, draw_slip, text_of, vocabulary
from kvprobe.tasks.worded_steps import Wording
from kvprobe.tasks.worked_answers import DRAFTS, HISTORY, Continuation
from kvprobe.tasks.worked_sums import WorkedSum, draw_sum, single, with_errors
from kvprobe.text.tokens import Tokens
from kvprobe.training.steps import CHAT_TEMPLATE, Steps
from kvprobe.training.words import word_tokenizer
from tests.refusals import refused


@pytest.fixture(scope="module")
def wording() -> Wording:
    return Wording(Steps(shape="moe", corpus="plain").tokenizer(), "steps")


@pytest.fixture(scope="module")
def english(smol_tokenizer: Any) -> Wording:
    return Wording(smol_tokenizer, "smollm2-135m")


def a_slip(seed: int = 3, wraps: bool = True) -> Slip:
    return draw_slip(np.random.default_rng(seed), wraps)


def texts_of(wording: Wording, arm: Continuation) -> str:
    return wording.tokenizer.decode(list(arm.prompt.ids))


# ---- the problems


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_slip_and_the_harmless_change_state_the_same_value_and_are_followed_by_the_same(seed: int, wraps: bool):
    slip = draw_slip(np.random.default_rng(seed), wraps)
    steps = {name: draft for name, (_, draft) in slip.drafts.items()}
    assert steps["slip"][SLIPPED].after == steps["harmless"][SLIPPED].after == slip.wrong != slip.right
    assert [step.adds_up for step in steps["slip"]] == [True, True, False]
    assert all(step.adds_up for name in ("sound", "harmless") for step in steps[name])
    register = steps["slip"][SLIPPED].operation.register
    assert register not in {step.operation.register for step in slip.later}
    assert slip.problem.operations[-1].register == register
    assert slip.problem.steps()[-1].before == slip.right
    assert slip.harmless.steps()[-1].before == slip.wrong
    assert slip.harmless.steps()[SLIPPED + 1 : -1] == slip.later
    if not wraps:
        assert all(step.within for step in slip.problem.steps())


@pytest.mark.parametrize("wrong", range(10))
def test_a_slip_may_state_any_other_value_and_the_harmless_change_leads_to_it(wrong: int):
    slip = a_slip(wraps=False)
    if wrong != slip.right:
        other = slip.stating(wrong)
        assert other.drafts["slip"][1][SLIPPED].after == other.drafts["harmless"][1][SLIPPED].after == wrong
        assert all(step.adds_up and step.within for step in other.drafts["harmless"][1][SLIPPED:])
        assert other.later == slip.later


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_histories_differ_in_wrong_steps_alone_and_the_last_step_depends_on_none(seed: int, wraps: bool):
    drawn = with_errors(np.random.default_rng(seed), wraps)
    assert [count for _, _, count in drawn] == list(range(HISTORY + 1))
    assert len({problem for problem, _, _ in drawn}) == 1
    for problem, steps, count in drawn:
        assert sum(not step.adds_up for step in steps) == count
        assert problem.operations[-1].register not in {step.operation.register for step in steps}


def test_a_step_alone_starts_from_the_values_before_it():
    slip = a_slip()
    steps = slip.problem.steps()
    values = dict(zip("abc", slip.problem.starts, strict=True))
    for number, step in enumerate(steps):
        assert single(slip.problem, values, number).steps() == (step,)
        values[step.operation.register] = step.after


# ---- how they are put


def test_each_arm_puts_the_same_steps_in_its_own_way(wording: Wording):
    slip = a_slip()
    by_name = {(arm.name, arm.draft, arm.delay): texts_of(wording, arm) for arm in WorkedSum(wording, slip).arms()}
    stated = WorkedSum(wording, slip).stated("slip")
    question, steps = slip.problem.question, text_of(stated)
    begun = f"<bos> <user> {question} solve <end> <assistant>"
    right = slip.problem.steps()[SLIPPED]
    assert by_name["continue", "slip", LATER] == f"{begun} {steps}"
    assert by_name["fresh", "slip", LATER] == begun
    assert by_name["ordered", "slip", LATER] == f"{begun} {steps} <end> <user> continue <end> <assistant>"
    assert by_name["review", "slip", LATER] == f"{begun} {steps} <end> <user> review <end> <assistant>"
    assert by_name["erratum", "slip", LATER] == (
        f"{begun} {steps} <end> <user> note {right} continue <end> <assistant>"
    )
    assert by_name["handed", "slip", LATER] == f"<bos> <user> {question} {steps} continue <end> <assistant>"
    assert by_name["other's", "slip", LATER] == f"<bos> <user> {question} {steps} review <end> <assistant>"
    third = stated[: SLIPPED + 1]
    assert by_name["at once", "slip", 0] == f"{begun} {text_of(third).removesuffix(' ok')}"
    for delay in range(LATER + 1):
        taken = text_of(stated[: SLIPPED + 1 + delay]).removesuffix("ok")
        assert by_name["wait", "slip", delay] == f"{begun} {taken}wait"
    assert {draft for _, draft, _ in by_name} == set(DRAFTS)


@pytest.mark.parametrize("draft", DRAFTS)
def test_remarks_are_predicted_from_the_value_before_them(wording: Wording, draft: Draft):
    worked = WorkedSum(wording, a_slip())
    read, places = worked.remarked(draft)
    words = wording.tokenizer.decode(list(read.ids[len(worked.asked) :])).split()
    assert text_of(worked.stated(draft)) == " ".join([*words, "ok"])
    assert len(places) == LATER + 1
    for step, place in zip(worked.stated(draft)[SLIPPED:], places, strict=True):
        assert [*words, "ok"][place - 5 : place + 2] == f"{step} ok".split()


def test_sums_in_english_have_a_token_for_each_digit(english: Wording):
    assert not english.words
    for seed in range(20):
        worked = draw_sum(english, np.random.default_rng([0, seed]))
        drafts, rest, slip = worked.drafts(), worked.rest(), worked.slip
        assert len({len(draft) for draft in drafts.values()}) == 1
        digits = [english.tokenizer.decode([token]).strip() for token in (rest.right, rest.wrong)]
        assert digits == [str(slip.right), str(slip.wrong)]
        text = english.tokenizer.decode(list((drafts["slip"] + rest.later + rest.lead).ids))
        assert f"is {slip.wrong}.\n" in text
        assert text.rstrip().endswith(f"{slip.problem.operations[-1].register}:")


@pytest.mark.parametrize("language", ["wording", "english"])
def test_own_mistakes_are_drawn_by_the_chances_that_a_model_gives_the_digits(
    language: str, request: pytest.FixtureRequest
):
    """The right digit is never among them; in English, none from which a sum passes 9 or 0 is."""
    wording: Wording = request.getfixturevalue(language)
    worked, offered = draw_sum(wording, np.random.default_rng(3)), set[str]()

    def chances(before: Tokens, endings: Sequence[Sequence[int]]) -> list[float]:
        assert before == worked.asked
        offered.update(wording.tokenizer.decode(list(ids)).strip()[-1] for ids in endings)
        return [0.75, 0.25] + [0.0] * (len(endings) - 2)

    rng = np.random.default_rng(0)
    wrong = [worked.own_mistake(chances, rng).slip.wrong for _ in range(200)]
    assert str(worked.slip.right) not in offered
    assert len(offered) == 9 if wording.words else 2 <= len(offered) < 9
    often, rarely = sorted(map(int, offered))[:2]
    assert set(wrong) == {often, rarely}
    assert wrong.count(often) / 200 == pytest.approx(0.75, abs=0.1)


def test_a_vocabulary_that_lacks_a_word_is_refused():
    words = [word for word in vocabulary() if word != "ok"]
    old = Wording(word_tokenizer(words, CHAT_TEMPLATE, end="<end>"), "old")
    refused(lambda: old.drafts(a_slip(wraps=False)), "does not know all words")


# ---- answers, read


def said(wording: Wording, slip: Slip, text: str) -> Mapping[str, float]:
    return WorkedSum(wording, slip).outcome(text)


def said_of(right: int = 0, handed_on: int = 0, restated: int = 0, local: int = 0) -> Mapping[str, float]:
    return {"right": right, "handed_on": handed_on, "ends": 1, "restated": restated, "local": local}


def test_answers_are_read_by_their_last_step(wording: Wording):
    slip = a_slip()
    right = slip.problem.steps()
    wrong = slip.problem.steps({SLIPPED: slip.wrong})
    assert said(wording, slip, text_of(right[-1:])) == said_of(right=1, local=1)
    assert said(wording, slip, text_of(wrong[-1:])) == said_of(handed_on=1, local=1)
    again = f"wait {text_of(right[SLIPPED:])}"
    assert said(wording, slip, again) == said_of(right=1, restated=1, local=1)
    odd = replace(right[-1], after=(right[-1].after + 1) % 10)
    if odd.after != wrong[-1].after:
        assert said(wording, slip, text_of([odd])) == said_of()
    nothing = said(wording, slip, "wait wait")
    assert {name: value for name, value in nothing.items() if name != "local"} == dict.fromkeys(
        ("right", "handed_on", "ends", "restated"), 0
    )
    assert np.isnan(nothing["local"])


def test_answers_in_english_are_read_line_by_line(english: Wording):
    slip = a_slip(wraps=False)
    right = slip.problem.steps()
    text = "Sure! Here it is:\n" + english.steps(right) + "So the answer is 12."
    assert english.read(text) == right
    assert said(english, slip, text)["right"] == 1
    assert english.read("a: 3 plus 4 is 71.") == ()
    assert english.taken_back(right).endswith("\nWait,")
    assert english.stated(right).endswith(f"is {right[-1].after}")
