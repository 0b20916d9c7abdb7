"""The poisoning study: whole runs on tiny models, numbers of made-up tables, and the problems that it puts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.forced import given_answer
from kvprobe.inference.generate import Generation, generate
from kvprobe.inference.model import Model, load
from kvprobe.models.lanes import Lanes
from kvprobe.studies import poisoning
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.collect import (
    ALL,
    answers,
    attention,
    drawn,
    edits,
    histories,
    problems_of,
    read_drafts,
    remarks,
)
from kvprobe.studies.poisoning.conclude import conclude, slopes
from kvprobe.studies.poisoning.study import STUDY
from kvprobe.studies.poisoning.worked_solutions import WorkedSolution
from kvprobe.tasks.steps import LATER, SLIPPED, Draft
from kvprobe.tasks.worked_answers import DRAFTS, HISTORY, Answering, WorkedAnswer
from kvprobe.tasks.worked_sums import WAITED, WorkedSum, with_errors
from kvprobe.text.tokens import Tokens
from kvprobe.training.steps import Steps
from tests import models
from tests.experiments.made_up import answer_of
from tests.random_caches import assert_close_caches
from tests.refusals import refused
from tests.studies.runs import assert_figures, whole_run

SMALL = Config(problems=2, new=8)
MADE_UP = Config(problems=12)
LAYERS = 2
ARMS = ("continue", "ordered", "review", "other's", "handed", "erratum", "alone", "wait", "fresh")


def tiny(**shape: int) -> Model:
    return models.llama(tokenizer=Steps(shape="active", corpus="plain").tokenizer(), **shape)


@pytest.fixture(scope="module")
def finished(root: Path) -> Run:
    return whole_run(STUDY, SMALL, tiny(), root, [True, False, False, False])


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert set(findings.values("right", "arm")) == {*ARMS, "at once"}


def test_the_same_settings_give_the_same_rows(finished: Run):
    rows, model = finished.df(), tiny()
    again = pd.DataFrame(edits(model, SMALL, 1, ()))
    pd.testing.assert_frame_equal(rows[rows["sample"] == 1].reset_index(drop=True), again, check_dtype=False)


@pytest.mark.parametrize("task", ["sums", "beads"])
def test_what_prompts_have_in_common_is_read_once_and_nothing_else_changes(
    wordy: Model, task: str, monkeypatch: pytest.MonkeyPatch
):
    model = tiny() if task == "sums" else wordy
    config = replace(SMALL, task=task)
    case = model, config, 0, problems_of(config)
    worked = drawn(*case)

    def said(prompt: Tokens) -> str:
        return model.generate([prompt], max_new_tokens=SMALL.new).text

    def reading(lanes: Lanes, prompts: Sequence[Tokens], past: KVCache | None, max_new_tokens: int) -> Generation:
        before = [] if past is None else past.ledger.tokens[0].tolist()
        read.extend((*before, *prompt.ids) for prompt in prompts)
        return generate(lanes, prompts, past, max_new_tokens=max_new_tokens)

    def asking(self: WorkedAnswer, answer: Answering, draft: Draft) -> Mapping[str, float]:
        def answered(prompt: Tokens) -> str:
            asked.append(prompt.ids)
            return answer(prompt)

        return alone(self, answered, draft)

    read, asked, alone = list[tuple[int, ...]](), list[tuple[int, ...]](), type(worked).alone
    monkeypatch.setattr("kvprobe.studies.poisoning.collect.generate", reading)
    monkeypatch.setattr(type(worked), "alone", asking)
    arms, rows = worked.arms(), answers(*case)
    assert len(asked) >= len(DRAFTS)
    assert read == [*(arm.prompt.ids for arm in arms), *asked]
    assert [row["text"] for row in rows[: len(arms)]] == [said(arm.prompt) for arm in arms]

    written = worked.drafts()
    for draft, cache in read_drafts(model, written).items():
        assert_close_caches(cache, model.prefill(written[draft]))

    asked_after = worked.histories(np.random.default_rng([config.seed, 0, 1]))
    for history, row in zip(asked_after, histories(*case), strict=True):
        given = given_answer(model, None, history.prompt, history.result)
        assert row["log_probability"] == pytest.approx(given.log_prob, rel=1e-4)


def test_worked_solutions_are_drawn_or_read_from_a_file(wordy: Model, tmp_path: Path):
    run = poisoning.run(Config(task="beads", problems=2, new=8), tmp_path, model=wordy)
    findings = Conclusion.of(run.metrics).findings
    assert set(findings.values("right", "arm")) == {*ARMS}
    assert "notices" not in findings
    assert set(findings.values("lift", "over")) == {"sound"}
    assert_figures(run, "right_by_arm", "undone_by_layer", "right_after_errors", "attention_by_layer")
    assert run.metrics["controls"][0]["holds"]

    entry = {
        "question": "Ann has 3 rows of 9 stars. 4 fall off.",
        "answer": "3*9=<<3*9=27>>27.\nSo then 27-4=<<27-4=23>>23.\n#### 23",
    }
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join([json.dumps(entry)] * (2 + HISTORY)), encoding="utf-8")
    mine = Config(task=f"gsm8k:{file}", problems=2, mistake="own")
    worked = drawn(wordy, mine, 1, problems_of(mine))
    assert isinstance(worked, WorkedSolution)
    assert worked.question.startswith(entry["question"])
    assert worked.wrong in {wrong for _, wrong in worked.problem.wrongs(worked.place)}
    refused(lambda: Config(task="bead"), "task", "beads")


def test_a_model_without_tokenizer_is_refused(tmp_path: Path):
    bare = load(models.any_model().lanes.plain)
    refused(lambda: poisoning.run(SMALL, tmp_path, model=bare), "has no tokenizer")


def test_remarks_are_read_where_they_stand():
    model = tiny()
    worked = drawn(model, SMALL, 0, ())
    assert isinstance(worked, WorkedSum)
    rows = pd.DataFrame(remarks(model, SMALL, 0, ())).set_index(["draft", "delay"])["wait"]
    wording = worked.wording
    for draft, delay in rows.index:
        text = wording.stated(worked.stated(draft)[: SLIPPED + 1 + delay])
        logits = model.extend(None, [worked.asked + wording.after(worked.asked, "answer", text)])[1][0, -1]
        assert rows[draft, delay] == pytest.approx(float(logits.softmax(-1)[wording.ids("wait")[0]]), rel=1e-4)


def test_the_shipped_mixture_finds_errors_at_once_and_keeps_them_in_one_place():
    model, config = load("steps-moe-corrected-0"), Config(problems=4)
    chances = pd.DataFrame([row for case in range(4) for row in remarks(model, config, case, ()) if not row["delay"]])
    now = chances.groupby("draft")["wait"].mean()
    assert now["slip"] > 0.5 > 0.2 > now["sound"]
    for case in range(2):
        by_edit = pd.DataFrame(edits(model, config, case, ())).query(f"layer == {ALL}").set_index("edit")
        assert by_edit.loc["sound", "kl"] == 0
        margin = by_edit["margin"]
        assert margin["sound"] > 0 > margin["slip"]
        assert margin["sound step"] > margin["sound later steps"]  # what later steps hold decides less
        assert margin["restarted slip"] == pytest.approx(margin["restarted sound"])
    worked = drawn(model, config, 0, ())
    assert worked.alone(lambda prompt: model.generate([prompt], max_new_tokens=30).text, "sound")["right"]
    table = pd.DataFrame(attention(model, config, 0, ()))
    assert set(table["draft"]) == {"sound", "slip", "harmless"}
    assert table["mass"].between(0, 1).all()
    given = list(histories(model, config, 0, ()))
    assert given[0]["right"] == 1
    assert [row["wrong"] for row in given] == list(range(HISTORY + 1))


def histories_of(count: int, errs: Callable[[np.random.Generator, list[bool]], bool]) -> pd.DataFrame:
    """Rows as a model gives them whose next step errs as `errs` says of which steps before are wrong."""
    rows = []
    for case in range(count):
        rng = np.random.default_rng(case)
        for _, steps, count in with_errors(rng, wraps=True):
            wrong = [not step.adds_up for step in steps]
            rows.append({"sample": case, "wrong": count, "right": float(not errs(rng, wrong))})
    return pd.DataFrame(rows)


def test_a_model_as_right_as_its_last_step_has_slope_1_and_one_that_ignores_it_0():
    copied = slopes(histories_of(400, lambda _, wrong: wrong[-1]))["slope"]
    assert copied.mean() == pytest.approx(1, abs=3 * copied.std() / 20)
    assert copied.std() > 0
    ignored = slopes(histories_of(400, lambda rng, _: bool(rng.random() < 0.3)))["slope"]
    assert ignored.mean() == pytest.approx(0, abs=3 * ignored.std() / 20)
    assert (slopes(histories_of(3, lambda *_: False))["slope"] == 0).all()


Number = Callable[[int], float]


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
            edited.append({"edit": edit, "layer": ALL, "margin": margin, "kl": 1.0, "right": 0.0, "sample": case})
        for layer in range(LAYERS):
            margin = margins["sound"] if layer else margins["slip"]
            row = {"edit": "sound step", "layer": layer, "margin": margin, "kl": 1.0, "right": 0.0, "sample": case}
            edited.append(row)
            for draft, mass in (("sound", 0.2), ("slip", 0.3 + case / 1000), ("harmless", 0.25)):
                attended.append({"draft": draft, "layer": layer, "mass": mass, "sample": case})
        for draft in DRAFTS:
            for name in (*ARMS[: None if draft == "slip" else -1], "at once"):
                value = given.get(name, default["continue"])(case) if draft == "slip" else sound(case)
                row = {"arm": name, "draft": draft, "right": value, "handed_on": 1 - value, "restated": 0.0}
                row |= {"local": 1.0, "ends": 1.0, "text": "a 1", "sample": case}
                delays = range(LATER + 1) if name == "wait" else [0 if name == "at once" else LATER]
                answered += [{**row, "delay": delay, "main": name != "wait" or delay == WAITED} for delay in delays]
            for delay in range(LATER + 1):
                chance = given["notices"](case) if draft == "slip" else 0.0
                remarked.append({"draft": draft, "delay": delay, "wait": chance if delay == 0 else 0.0, "sample": case})
        for wrong in range(HISTORY + 1):
            error = given["slope"](case) * wrong / HISTORY
            history.append({"wrong": wrong, "right": 1 - error, "log_probability": -1.0, "sample": case})
    tables = {"samples": edited, "attention": attended, "answers": answered, "remarks": remarked, "histories": history}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def concluded(tables: dict[str, pd.DataFrame]) -> Conclusion:
    return conclude(tables, MADE_UP, tiny())


def example() -> tuple[Config, Conclusion]:
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


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"continue": lambda _: 1.0, "sound": lambda _: 0.0}, "raises the share of right answers"),
        ({"fresh": lambda _: 0.0, "continue": lambda _: 1.0}, "a fresh start harms"),
        ({"review": lambda case: case % 2 / 10, "others": lambda _: 1.0}, "it loses more by the slip than"),
        ({"review": lambda case: 1 - case % 2 / 10, "others": lambda _: 0.0}, "it loses less by the slip than"),
        ({"ghost": lambda case: 0.005 + case % 2 / 1000}, "keep nothing detectable of it"),
        ({"slope": lambda case: (-1) ** case / 5}, "does not detectably make errors likelier"),
    ],
)
def test_the_answer_follows_the_intervals(tables: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, MADE_UP, concluded(made_up(**tables)), tmp_path)


def test_controls_fail_where_they_should():
    cut = made_up()
    cut["answers"].loc[cut["answers"]["arm"] == "review", "ends"] = 0.0
    harmless = made_up()
    margins = harmless["samples"].set_index(["sample", "edit", "layer"])["margin"]
    harmless["samples"].loc[harmless["samples"]["edit"] == "slip", "margin"] = margins[:, "sound", ALL].to_numpy()
    tables = made_up(), made_up(off=lambda case: case / 100), made_up(sound=lambda _: 0.0), harmless, cut
    holds = [[control.holds for control in concluded(altered).controls] for altered in tables]
    assert holds[0] == [True] * 4
    assert [[not held for held in row].index(True) for row in holds[1:]] == [0, 1, 2, 3]
