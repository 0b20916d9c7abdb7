"""The poisoning study: whole runs on tiny models, numbers of made-up tables, and the problems that it puts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model, load
from kvprobe.studies import poisoning
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.cases import DRAFTS, HISTORY, Arm
from kvprobe.studies.poisoning.collect import ALL, attention, cases_of, edits, results
from kvprobe.studies.poisoning.conclude import conclude, slopes
from kvprobe.studies.poisoning.study import STUDY
from kvprobe.studies.poisoning.sums import WAITED, Sum, own_mistake, single, with_errors
from kvprobe.tasks.steps import LATER, SLIPPED, Slip, draw_slip, text_of, vocabulary
from kvprobe.tasks.worded_steps import Wording
from kvprobe.training.steps import CHAT_TEMPLATE, Steps
from kvprobe.training.words import word_tokenizer
from tests import models
from tests.refusals import refused
from tests.studies.runs import answer_of, assert_figures, in_steps

SMALL = Config(problems=2, new=8)
MADE_UP = Config(problems=12)
LAYERS = 2
SHIPPED = "steps-moe-corrected-0"


def tiny(**shape: int) -> Model:
    return models.llama(tokenizer=Steps(shape="active", corpus="plain").tokenizer(), **shape)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root, model = tmp_path_factory.mktemp("runs"), tiny()
    return in_steps(lambda: poisoning.run(SMALL, root, model=model))


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    arm_names = {"continue", "at once", "wait", "ordered", "review", "other's", "handed", "erratum", "fresh", "alone"}
    assert set(findings.values("right", "arm")) == arm_names
    assert_figures(finished, *(figure.file for figure in STUDY.figures))
    assert finished.metrics["controls"][0]["holds"]


def test_the_same_settings_give_the_same_rows(finished: Run):
    rows, model = finished.df(), tiny()
    again = edits(model, cases_of(model, SMALL)(1)).assign(case=1)
    pd.testing.assert_frame_equal(rows[rows["case"] == 1].reset_index(drop=True), again, check_dtype=False)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path):
    bare = load(models.any_model().lanes.plain)
    refused(lambda: poisoning.run(SMALL, tmp_path, model=bare), "has no tokenizer")


# ---- the problems


@pytest.fixture(scope="module")
def wording() -> Wording:
    return Wording(Steps(shape="moe", corpus="plain").tokenizer(), "steps")


def a_slip(seed: int = 3, wraps: bool = True) -> Slip:
    return draw_slip(np.random.default_rng(seed), wraps)


def texts_of(wording: Wording, arm: Arm) -> str:
    return wording.tokenizer.decode(list(arm.prompt.ids))


def test_each_arm_puts_the_same_steps_in_its_own_way(wording: Wording):
    slip = a_slip()
    by_name = {(arm.name, arm.draft, arm.delay): texts_of(wording, arm) for arm in Sum(wording, slip).arms()}
    stated = Sum(wording, slip).stated("slip")
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


@pytest.mark.parametrize("wrong", range(10))
def test_a_slip_may_state_any_other_value_and_the_harmless_change_leads_to_it(wrong: int):
    slip = a_slip(wraps=False)
    if wrong != slip.right:
        other = slip.stating(wrong)
        assert other.drafts["slip"][1][SLIPPED].after == other.drafts["harmless"][1][SLIPPED].after == wrong
        assert all(step.adds_up and step.within for step in other.drafts["harmless"][1][SLIPPED:])
        assert other.later == slip.later


def test_the_models_own_mistakes_are_as_frequent_as_it_holds_them_likely():
    """A model whose head is replaced says the right digit first, one wrong digit often and another rarely."""
    model, slip = tiny(), a_slip()
    often, rarely = ((slip.right + more) % 10 for more in (3, 4))
    said = {slip.right: 9.0, often: 6.0, rarely: 5.0}
    head = model.lanes.plain.get_output_embeddings()
    logits = torch.full((head.weight.shape[0],), -30.0)
    for value, logit in said.items():
        logits[model.tokenizer.convert_tokens_to_ids(str(value))] = logit
    hook = head.register_forward_hook(lambda _, __, hidden: logits.expand(*hidden.shape[:-1], -1))
    rng = np.random.default_rng(0)
    drawn = [own_mistake(model, slip, rng) for _ in range(200)]
    hook.remove()
    assert set(drawn) == {often, rarely}
    assert drawn.count(often) / 200 == pytest.approx(1 / (1 + np.exp(-1)), abs=0.1)


# ---- answers, read


def said(wording: Wording, slip: Slip, text: str) -> Mapping[str, float]:
    return Sum(wording, slip).outcome(text)


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


def test_answers_in_english_are_read_line_by_line():
    english = Wording(load("smollm2-135m").tokenizer, "smollm2-135m")
    slip = a_slip(wraps=False)
    right = slip.problem.steps()
    text = "Sure! Here it is:\n" + english.steps(right) + "So the answer is 12."
    assert english.read(text) == right
    assert said(english, slip, text)["right"] == 1
    assert english.read("a: 3 plus 4 is 71.") == ()
    assert english.taken_back(right).endswith("\nWait,")
    assert english.stated(right).endswith(f"is {right[-1].after}")


def test_remarks_are_read_where_they_stand():
    model, slip = tiny(), a_slip()
    wording = Wording.of(model)
    rows = Sum(wording, slip).remarks(model).set_index(["draft", "delay"])["wait"]
    asked = wording.chat(wording.question(slip.problem))
    for draft in DRAFTS:
        for delay in range(LATER + 1):
            text = wording.stated(Sum(wording, slip).stated(draft)[: SLIPPED + 1 + delay])
            logits = model.extend(None, [asked + wording.after(asked, "answer", text)])[1][0, -1]
            assert rows[draft, delay] == pytest.approx(float(logits.softmax(-1)[wording.ids("wait")[0]]), rel=1e-4)


def test_a_vocabulary_that_lacks_a_word_is_refused():
    words = [word for word in vocabulary() if word != "ok"]
    old = Wording(word_tokenizer(words, CHAT_TEMPLATE, end="<end>"), "old")
    refused(lambda: old.drafts(a_slip(wraps=False)), "does not know all words")


# ---- shipped models: what their training makes true


def test_the_shipped_mixture_finds_errors_at_once_and_keeps_them_in_one_place():
    model = load(SHIPPED)
    cases = [case for case in map(cases_of(model, Config(problems=4)), range(4)) if isinstance(case, Sum)]
    chances = pd.concat([case.remarks(model) for case in cases])
    now = chances[chances["delay"] == 0].groupby("draft")["wait"].mean()
    assert now["slip"] > 0.5 > 0.2 > now["sound"]
    for case in cases[:2]:
        by_edit = edits(model, case).query(f"layer == {ALL}").set_index("edit")
        assert by_edit.loc["sound", "kl"] == 0
        assert by_edit.loc["sound", "margin"] > 0 > by_edit.loc["slip", "margin"]
        off = by_edit.loc["sound step", "margin"] - by_edit.loc["sound later steps", "margin"]
        assert off > 0  # what later steps hold decides less
        assert by_edit.loc["restarted slip", "margin"] == pytest.approx(by_edit.loc["restarted sound", "margin"])
        assert case.alone(model, "sound", 30) == {"right": 1.0, "ends": 1.0}


def test_attention_and_results_are_of_the_step_that_was_asked_for():
    model = load(SHIPPED)
    case = cases_of(model, Config(problems=2))(0)
    table = attention(model, case)
    assert set(table["draft"]) == {"sound", "slip", "harmless"}
    assert table["mass"].between(0, 1).all()
    given = results(model, case.histories(np.random.default_rng(1)))
    assert given["right"][0] == 1
    assert list(given["wrong"]) == list(range(HISTORY + 1))


# ---- known answers of the slope


def histories_of(count: int, errs: Callable[[np.random.Generator, list[bool]], bool]) -> pd.DataFrame:
    """Rows as a model gives them whose next step errs as `errs` says of which steps before are wrong."""
    rows = []
    for case in range(count):
        rng = np.random.default_rng(case)
        for _, steps, count in with_errors(rng, wraps=True):
            wrong = [not step.adds_up for step in steps]
            rows.append({"case": case, "wrong": count, "right": float(not errs(rng, wrong))})
    return pd.DataFrame(rows)


def test_a_model_as_right_as_its_last_step_has_slope_1_and_one_that_ignores_it_0():
    copied = slopes(histories_of(400, lambda _, wrong: wrong[-1]))["slope"]
    assert copied.mean() == pytest.approx(1, abs=3 * copied.std() / 20)
    assert copied.std() > 0
    ignored = slopes(histories_of(400, lambda rng, _: bool(rng.random() < 0.3)))["slope"]
    assert ignored.mean() == pytest.approx(0, abs=3 * ignored.std() / 20)
    assert (slopes(histories_of(3, lambda *_: False))["slope"] == 0).all()


# ---- made-up tables

Number = Callable[[int], float]
ARMS = ("continue", "ordered", "review", "other's", "handed", "erratum", "alone")


def made_up(off: Number = lambda _: 0.0, sound: Number = lambda _: 1.0, **right: Number) -> dict[str, pd.DataFrame]:
    """Tables of twelve problems. Rightness after the slip by arm (`others` for the other's; `critique` for a review);
    also `ghost`, `notices` and `error` (of a step after so many wrong ones)."""
    default: dict[str, Number] = {
        "continue": lambda _: 0.0,
        "ordered": lambda _: 0.0,
        "review": lambda case: float(case % 4 > 0),
        "other's": lambda case: float(case % 4 > 0),
        "handed": lambda case: float(case % 2),
        "alone": lambda _: 1.0,
        "fresh": lambda _: 1.0,
        "wait": lambda case: float(case % 3 == 0),
        "ghost": lambda case: 0.5 + case % 2 / 100,
        "notices": lambda case: 0.9 + case % 2 / 100,
        "slope": lambda case: 0.2 + case % 2 / 100,
    }
    given = default | {name.replace("others", "other's"): number for name, number in right.items()}
    edited, attended, answered, remarked, history = [], [], [], [], []
    for case in range(MADE_UP.problems):
        margins = {"sound": 6.0 + case, "slip": -4.0 - case, "masked slip": 1.0, "restarted sound": 0.5}
        margins["masked sound"] = 1.0 + given["ghost"](case) * (margins["sound"] - margins["slip"])
        margins |= {"restarted slip": 0.5 + off(case), "sound step": margins["sound"], "sound later steps": -4.0 - case}
        for edit, margin in margins.items():
            edited.append({"edit": edit, "layer": ALL, "margin": margin, "kl": 1.0, "right": 0.0, "case": case})
        for layer in range(LAYERS):
            margin = margins["sound"] if layer else margins["slip"]
            row = {"edit": "sound step", "layer": layer, "margin": margin, "kl": 1.0, "right": 0.0, "case": case}
            edited.append(row)
            for draft, mass in (("sound", 0.2), ("slip", 0.3 + case / 1000), ("harmless", 0.25)):
                attended.append({"draft": draft, "layer": layer, "mass": mass, "case": case})
        for draft in DRAFTS:
            for name in (*ARMS, "wait", "at once", *(["fresh"] if draft == "slip" else [])):
                value = given.get(name, default["continue"])(case) if draft == "slip" else sound(case)
                row = {"arm": name, "draft": draft, "right": value, "handed_on": 1 - value, "restated": 0.0}
                row |= {"local": 1.0, "ends": 1.0, "text": "a 1", "case": case}
                delays = range(LATER + 1) if name == "wait" else [0 if name == "at once" else LATER]
                answered += [{**row, "delay": delay, "main": name != "wait" or delay == WAITED} for delay in delays]
            for delay in range(LATER + 1):
                chance = given["notices"](case) if draft == "slip" else 0.0
                remarked.append({"draft": draft, "delay": delay, "wait": chance if delay == 0 else 0.0, "case": case})
        for wrong in range(HISTORY + 1):
            error = given["slope"](case) * wrong / HISTORY
            history.append({"wrong": wrong, "right": 1 - error, "log_probability": -1.0, "case": case})
    tables = (edited, attended, answered, remarked, history)
    names = ("samples", "attention", "answers", "remarks", "histories")
    return {name: pd.DataFrame(rows) for name, rows in zip(names, tables, strict=True)}


def concluded(tables: dict[str, pd.DataFrame]) -> Conclusion:
    return conclude(tables, MADE_UP, tiny())


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return MADE_UP, concluded(made_up())


def noise(rng: np.random.Generator) -> Conclusion:
    """Right or wrong by chance in all arms, nothing noticed, no ghost, and errors that depend on none before."""

    def flip(_: int) -> float:
        return float(rng.random() < 0.5)

    tables = made_up(
        sound=flip,
        ghost=lambda _: float(rng.normal(0, 0.3)),
        **dict.fromkeys(("continue", "review", "others", "handed", "alone", "fresh", "wait"), flip),
    )
    tables["remarks"]["wait"] = rng.random(len(tables["remarks"]))
    tables["histories"]["right"] = (rng.random(len(tables["histories"])) < 0.7).astype(float)
    return concluded(tables)


def test_planted_numbers_are_found():
    findings = example()[1].findings
    cases = np.arange(MADE_UP.problems)
    assert findings.at("poisons").mean == 1.0
    assert findings.at("critique").mean == pytest.approx(0.25)
    assert findings.at("blind").mean == 0.0
    assert findings.at("handed").mean == pytest.approx(0.5)
    assert findings.at("wait").mean == pytest.approx(1 / 3)
    assert findings.at("delayed", delay=1, draft="slip").mean == pytest.approx(1 / 3)
    weights = 10.0 + 2 * cases
    assert findings.at("ghost").mean == pytest.approx(np.average(0.5 + cases % 2 / 100, weights=weights))
    assert findings.at("undone", edit="sound step").mean == 1.0
    assert findings.at("undone", edit="sound later steps").mean == 0.0
    assert [findings.at("undone_layer", layer=layer).mean for layer in range(LAYERS)] == [0.0, 1.0]
    assert findings.at("lift", layer=0, over="harmless").mean == pytest.approx(0.05 + cases.mean() / 1000)
    assert findings.at("conditioned").mean == pytest.approx(0.205)
    assert findings.at("notices").mean == pytest.approx(0.905)
    assert findings.at("standing", draft="slip", delay=3).mean == pytest.approx(0.095)
    assert findings.at("half_life").mean == 0
    assert {findings.finding(claim.finding).comparisons for claim in STUDY.claims} == {len(STUDY.claims)}


def test_each_cure_is_held_against_its_own_baseline():
    """A restart with the text against the same request in the old conversation, and “wait” one step after the slip."""
    tables = made_up(ordered=lambda _: 1.0)
    answers = tables["answers"]
    answers.loc[(answers["arm"] == "wait") & (answers["delay"] != WAITED) & (answers["draft"] == "slip"), "right"] = 0.0
    findings = concluded(tables).findings
    assert findings.at("handed").mean == pytest.approx(-0.5)
    assert findings.at("restart").mean == 1.0
    assert findings.at("wait").mean == pytest.approx(1 / 3)
    assert findings.at("delayed", delay=3, draft="slip").mean == 0.0


def test_errors_that_are_not_taken_back_have_no_half_life_and_false_alarms_do_not_count():
    tables = made_up()
    tables["remarks"]["wait"] = 0.3
    findings = concluded(tables).findings
    assert findings.at("notices").mean == 0
    assert np.isnan(findings.at("half_life").mean)
    assert findings.at("standing", draft="slip", delay=3).mean == pytest.approx(0.7**4)
    assert np.isnan(concluded(made_up(notices=lambda _: 0.1)).findings.at("half_life").mean)


def test_a_model_without_remarks_has_no_findings_on_them_and_the_page_says_so(tmp_path: Path):
    tables = made_up()
    del tables["remarks"]
    conclusion = concluded(tables)
    assert "notices" not in conclusion.findings
    assert "says “wait”" not in answer_of(STUDY, MADE_UP, conclusion, tmp_path)


ALTERNATES: Number = lambda case: float(case % 2)  # noqa: E731


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, "lowers the share of right answers"),
        ({"continue": lambda _: 1.0}, "does not detectably change the share of right answers"),
        ({"continue": lambda _: 1.0, "sound": lambda _: 0.0}, "raises the share of right answers"),
        ({}, "a fresh start helps"),
        ({"fresh": lambda _: 0.0, "continue": lambda _: 1.0}, "a fresh start harms"),
        ({"fresh": lambda _: 0.0}, "a fresh start does not detectably help"),
        ({}, "says “wait” more often than after a right one"),
        ({"notices": lambda case: case % 2 / 50}, "does not detectably notice it"),
        ({"review": lambda _: 0.0}, "is right less often with the slip in it"),
        ({"review": lambda _: 1.0}, "is not detectably less often right with the slip in it"),
        ({"review": lambda _: 0.0, "others": lambda _: 1.0}, "it loses more by the slip than"),
        ({"review": lambda _: 1.0, "others": lambda _: 0.0}, "it loses less by the slip than"),
        ({}, "keep a part of it"),
        ({"ghost": lambda case: (-1) ** case / 5}, "keep nothing detectable of it"),
        ({"ghost": lambda case: -0.3 - case / 100}, "work against it"),
        ({}, "makes errors likelier in a step"),
        ({"slope": lambda case: (-1) ** case / 5}, "does not detectably make errors likelier"),
    ],
)
def test_the_answer_follows_the_intervals(tables: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, MADE_UP, concluded(made_up(**tables)), tmp_path)


def test_controls_fail_where_they_should():
    cut = made_up()
    cut["answers"].loc[cut["answers"]["arm"] == "review", "ends"] = 0.0
    harmless = made_up()
    margins = harmless["samples"].set_index(["case", "edit", "layer"])["margin"]
    harmless["samples"].loc[harmless["samples"]["edit"] == "slip", "margin"] = margins[:, "sound", ALL].to_numpy()
    tables = made_up(), made_up(off=lambda case: case / 100), made_up(sound=lambda _: 0.0), harmless, cut
    holds = [[control.holds for control in concluded(altered).controls] for altered in tables]
    assert holds[0] == [True] * 4
    assert [[not held for held in row].index(True) for row in holds[1:]] == [0, 1, 2, 3]
