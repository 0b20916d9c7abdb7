"""The routing study: whole runs on tiny mixtures, numbers of made-up tables, and the problems that it reads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model, load
from kvprobe.patching.metrics import LogitDiff
from kvprobe.routing import read
from kvprobe.studies import routing
from kvprobe.studies.routing import Config
from kvprobe.studies.routing.collect import ALL, PAIRS, after_a_slip, cold_and_warm, slips
from kvprobe.studies.routing.conclude import conclude
from kvprobe.studies.routing.study import STUDY
from kvprobe.tasks.steps import SLIPPED, draw_slip
from kvprobe.tasks.worded_steps import Wording
from kvprobe.training.steps import Steps
from tests import models
from tests.refusals import refused
from tests.studies.runs import answer_of, assert_figures, in_steps

SMALL = Config(problems=2, start=6)
MADE_UP = Config(problems=10)
LAYERS, EXPERTS, TOKENS = 2, 4, 5


@pytest.fixture(scope="module")
def tiny() -> Model:
    return models.mixtral(tokenizer=Steps(shape="moe", corpus="plain").tokenizer())


@pytest.fixture(scope="module")
def finished(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("runs")
    return in_steps(lambda: routing.run(SMALL, root, model=tiny))


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {"alike", "undone", "cold"} <= set(findings.names)
    assert findings.at("chance").mean == pytest.approx(7 / 18)  # two of four experts
    assert len(findings.where("load")) == 3 * 4
    assert_figures(finished, *(figure.file for figure in STUDY.figures))
    assert finished.metrics["controls"][0]["holds"]
    assert set(findings.values("start_all", "pair")) == {"cold", "warm", "nothing"}
    assert findings.values("token", "place")[:2] == ["0 register", "1 before"]


def test_the_same_settings_give_the_same_rows(finished: Run, tiny: Model):
    rows = finished.df()
    slip = slips(tiny, SMALL)[1]
    again = after_a_slip(tiny, 1, slip)
    pd.testing.assert_frame_equal(rows[rows["case"] == 1].reset_index(drop=True), again, check_dtype=False)


def test_a_dense_model_is_refused(tmp_path: Path):
    refused(lambda: routing.run(SMALL, tmp_path, model=models.any_model()), "has no experts that kvprobe can find")


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


def test_the_shipped_mixture_solves_sums_and_goes_by_what_was_stated():
    model = load("steps-moe-corrected-0")
    wording = Wording.of(model)
    for slip in slips(model, Config(problems=3)):
        problem, _ = slip.drafts["sound"]
        said = model.generate([{"role": "user", "content": wording.question(problem)}], max_new_tokens=50).text
        assert said == wording.steps(problem.steps()).strip()
        preferred = {}
        for name, draft in wording.drafts(slip).items():
            suffix, right, wrong = wording.suffix(slip, draft)
            margin = LogitDiff(right, wrong)
            preferred[name] = float(margin(model.extend(model.prefill(draft), [suffix])[1][0])) > 0
        assert preferred == {"sound": True, "slip": False, "harmless": False}


def test_sums_in_english_have_a_token_for_each_digit():
    model = load("smollm2-135m")
    wording = Wording.of(model)
    assert not wording.words
    for slip in slips(model, Config(problems=20)):
        drafts = wording.drafts(slip)
        assert len({len(draft) for draft in drafts.values()}) == 1
        suffix, right, wrong = wording.suffix(slip, drafts["sound"])
        assert model.tokenizer.decode([right]).strip() == str(slip.right)
        assert model.tokenizer.decode([wrong]).strip() == str(slip.wrong)
        text = model.tokenizer.decode(list(drafts["slip"].ids + suffix.ids))
        assert f"is {slip.wrong}.\n" in text
        assert text.rstrip().endswith(f"{slip.problem.operations[-1].register}:")


def test_a_cold_start_is_the_beginning_of_a_conversation_read_where_the_question_stands():
    """What is compared with it is the same text; and without a conversation before, nothing differs."""
    model = load("steps-moe-corrected-0")
    (slip,) = slips(model, Config(problems=2))[:1]
    chat = [{"role": "user", "content": Wording.of(model).question(slip.problem)}]
    (tokens,) = model.tokens(chat)
    cold = read(model, tokens[1:9].shifted(101), model.prefill(tokens[:1].shifted(100))).routing
    table = cold_and_warm(model, 0, slip, Config(problems=2, start=8))
    entropies = table[table["pair"] == "cold"].sort_values(["layer", "token"])["entropy"]
    assert np.allclose(entropies, cold.entropy[:, 0].flatten(), atol=1e-5)
    assert model.tokenizer.decode(list(tokens.ids[:1])) == "<bos>"


# ---- made-up tables

Number = Callable[[int], float]


def made_up(
    slip: Number = lambda case: 0.6 + 0.01 * (case % 3),
    alike: Number = lambda case: 0.8 + 0.01 * (case % 4),
    undone: Number = lambda case: 0.5 + 0.01 * (case % 2),
    cold: Number = lambda case: 0.3 + 0.01 * (case % 3),
    warm: Number = lambda case: 0.7,
    off: float = 0.0,
    as_stated: float = 1.0,
) -> dict[str, pd.DataFrame]:
    rows, starts = [], []
    for case in range(MADE_UP.problems):
        of_case = {"case": case, "margin_sound": 5.0 + case, "margin_slip": -5.0 - case, "margin_harmless": -6.0}
        of_case["as_stated"] = as_stated
        for pair, overlap in zip(PAIRS, (slip(case), 0.5, alike(case)), strict=True):
            for layer in range(LAYERS):
                for token in range(TOKENS):
                    measured = {"overlap": overlap, "jsd": 0.1, "entropy": 0.5, "other_entropy": 0.5}
                    at = {"kind": "token", "layer": layer, "token": float(token), "text": f"t{token}"}
                    rows.append({**at, **measured, "pair": pair, **of_case})
        for draft in ("slip", "harmless"):
            for layer in (ALL, *range(LAYERS)):
                at = {"kind": "exchange", "layer": layer, "damage": 2.0 + case, "undone": undone(case) * (2.0 + case)}
                rows.append({**at, "caused": 0.2, "kept": float(case > 0), "draft": draft, **of_case})
            rows.append({"kind": "own", "draft": draft, "off": off, **of_case})
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                share = {0: 1.0, 1: 0.7, 2: 0.3, 3: 0.0}[expert]
                rows.append({"kind": "load", "layer": layer, "expert": expert, "share": share, **of_case})
        for pair, overlap in (("cold", cold(case)), ("warm", warm(case)), ("nothing", 0.1)):
            for token in range(3):
                at = {"layer": 0, "token": token, "text": "t", "overlap": overlap if token else 0.0}
                starts.append({**at, "jsd": 0.1, "entropy": 0.4, "other_entropy": 0.4, "pair": pair, "case": case})
    return {"samples": pd.DataFrame(rows), "starts": pd.DataFrame(starts)}


def concluded(tables: dict[str, pd.DataFrame]) -> Conclusion:
    return conclude(tables, MADE_UP, models.any_model())


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return MADE_UP, concluded(made_up())


def noise(rng: np.random.Generator) -> Conclusion:
    """Slips are routed as like the one as the other, nothing goes through it, and cold starts are as warm ones."""
    overlap = [lambda _: float(rng.normal(0.6, 0.1)) for _ in range(4)]
    slip, alike, cold, warm = overlap
    return concluded(made_up(slip, alike, lambda _: float(rng.normal(0, 0.2)), cold, warm))


def test_planted_numbers_are_found():
    findings = example()[1].findings
    cases = range(MADE_UP.problems)
    alike = np.mean([0.8 + 0.01 * (case % 4) - 0.6 - 0.01 * (case % 3) for case in cases])
    assert findings.at("alike").mean == pytest.approx(alike)
    assert {findings.finding(name).comparisons for name in ("alike", "undone", "cold")} == {3}
    assert findings.at("kept", draft="slip").mean == pytest.approx(0.9)
    shares = [0.5 + 0.01 * (case % 2) for case in cases]
    assert findings.at("undone").mean == pytest.approx(np.average(shares, weights=[2.0 + case for case in cases]))
    assert findings.at("done_by", draft="slip").mean == pytest.approx(0.2 * 10 / sum(2.0 + case for case in cases))
    assert findings.at("cold").mean == pytest.approx(np.mean([0.7 - 0.3 - 0.01 * (case % 3) for case in cases]))
    assert findings.at("start", pair="warm", place=0).mean == 0.0  # shown, but in no mean
    assert findings.at("start_all", pair="warm").mean == pytest.approx(0.7)
    assert findings.at("load", layer=1, expert=1).mean == pytest.approx(0.7)
    assert findings.values("token", "place") == [str(token) for token in range(TOKENS)]


def test_tokens_are_mapped_only_where_all_problems_have_as_many():
    tables = made_up()
    rows = tables["samples"]
    tables["samples"] = rows[~((rows["case"] == 0) & (rows["kind"] == "token") & (rows["token"] == TOKENS - 1))]
    findings = concluded(tables).findings
    assert "token" not in findings
    assert "overlap_last" in findings


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, "are routed rather as where that value is right than as after the sound draft"),
        ({"slip": lambda _: 0.95}, "are routed rather as after the sound draft than as where that value is right"),
        ({"slip": lambda case: 0.8 + (-1) ** case / 10}, "are not detectably routed more like either"),
        ({}, "goes in part through the routers"),
        ({"undone": lambda _: -0.3}, "is held back by the routers"),
        ({"undone": lambda case: (-1) ** case / 5}, "does not detectably go through the routers"),
        ({"undone": lambda _: 0.009}, "does not detectably go through the routers"),
        ({"cold": lambda _: 0.9}, "is routed more like"),
        ({"cold": lambda case: 0.7 + (-1) ** case / 10}, "is not detectably routed differently from"),
    ],
)
def test_the_answer_follows_the_intervals(tables: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, MADE_UP, concluded(made_up(**tables)), tmp_path)


def test_controls_fail_where_they_should():
    tables = made_up(), made_up(off=1e-3), made_up(as_stated=0.4)
    holds = [[control.holds for control in concluded(altered).controls] for altered in tables]
    assert holds == [[True, True], [False, True], [True, False]]
