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
from kvprobe.studies.routing.collect import ALL, PAIRS, after_a_slip, begun_after, cold_and_warm, courses, sums
from kvprobe.studies.routing.conclude import conclude
from kvprobe.studies.routing.study import STUDY
from kvprobe.training.steps import Steps
from tests import models
from tests.experiments.made_up import answer_of
from tests.refusals import refused
from tests.studies.runs import whole_run

SMALL = Config(problems=2, start=6)
MADE_UP = Config(problems=10)
LAYERS, EXPERTS, TOKENS = 2, 4, 5


@pytest.fixture(scope="module")
def tiny() -> Model:
    return models.mixtral(tokenizer=Steps(shape="moe", corpus="plain").tokenizer())


@pytest.fixture(scope="module")
def finished(tiny: Model, root: Path) -> Run:
    return whole_run(STUDY, SMALL, tiny, root, [True, False])


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {"alike", "undone", "cold"} <= set(findings.names)
    assert findings.at("chance").mean == pytest.approx(7 / 18)  # two of four experts
    assert len(findings.where("load")) == 3 * 4
    assert set(findings.values("start_all", "pair")) == {"cold", "warm", "nothing"}
    assert findings.values("token", "place")[:2] == ["0 register", "1 before"]


def test_the_same_settings_give_the_same_rows(finished: Run, tiny: Model):
    rows = finished.df()
    again = after_a_slip(tiny, SMALL, (1, sums(tiny, SMALL)[1]))
    pd.testing.assert_frame_equal(rows[rows["sample"] == 1].reset_index(drop=True), again, check_dtype=False)


def test_a_dense_model_is_refused(tmp_path: Path):
    refused(lambda: routing.run(SMALL, tmp_path, model=models.any_model()), "has no experts that kvprobe can find")


def test_the_shipped_mixture_solves_sums_and_goes_by_what_was_stated():
    model = load("steps-moe-corrected-0")
    for worked in sums(model, Config(problems=3)):
        said = model.generate([{"role": "user", "content": worked.question}], max_new_tokens=50).text
        assert said == worked.wording.steps(worked.slip.problem.steps()).strip()
        rest = worked.rest()
        margin = LogitDiff(rest.right, rest.wrong)
        prefers_right = {
            draft: float(margin(model.extend(model.prefill(tokens), [rest.later + rest.lead])[1][0])) > 0
            for draft, tokens in worked.drafts().items()
        }
        assert prefers_right == {"sound": True, "slip": False, "harmless": False}


def test_a_cold_start_is_the_beginning_of_a_conversation_read_where_the_question_stands(tiny: Model):
    (worked, _) = sums(tiny, SMALL)
    (tokens,) = tiny.tokens([{"role": "user", "content": worked.question}])
    assert tiny.tokenizer.decode(list(tokens.ids[:1])) == "<bos>"
    cold = read(tiny, tokens[1:7].shifted(101), tiny.prefill(tokens[:1].shifted(100))).routing
    table = cold_and_warm(tiny, SMALL, (0, worked))
    entropies = table[table["pair"] == "cold"].sort_values(["layer", "token"])["entropy"]
    assert np.allclose(entropies, cold.entropy[:, 0].flatten(), atol=1e-5)


def test_the_answer_is_read_at_the_same_places_cold_and_warm_and_own_routing_changes_nothing(tiny: Model):
    worked = sums(tiny, SMALL)[0]
    table = courses(tiny, SMALL, (0, worked)).pivot(index="step", columns="run", values="log_probability")
    wording, steps = worked.wording, worked.slip.problem.steps()
    begun = begun_after(worked, 0, SMALL)
    before = begun.earlier[0]
    for place in range(len(steps)):
        text = wording.after(worked.asked, "answer", wording.stated(steps[: place + 1]))
        read = (worked.asked + text)[len(begun.opening) :].shifted(before.following)
        scores = tiny.extend(None, [before + read[:-1]])[1][0, -1].log_softmax(-1)
        assert float(scores[text.ids[-1]]) == pytest.approx(table["warm"][place + 1], abs=1e-4)
    assert not np.allclose(table["cold"], table["cold, routed warm"])


Number = Callable[[int], float]


def made_up(
    slip: Number = lambda case: 0.6 + 0.01 * (case % 3),
    alike: Number = lambda case: 0.8 + 0.01 * (case % 4),
    undone: Number = lambda case: 0.5 + 0.01 * (case % 2),
    cold: Number = lambda case: 0.3 + 0.01 * (case % 3),
    warm: Number = lambda case: 0.7,
    nats: Number = lambda case: 0.3 + 0.01 * (case % 2),
    off: float = 0.0,
    as_stated: float = 1.0,
) -> dict[str, pd.DataFrame]:
    rows, starts, courses = [], [], []
    for case in range(MADE_UP.problems):
        of_case = {"sample": case, "margin_sound": 5.0 + case, "margin_slip": -5.0 - case, "margin_harmless": -6.0}
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
                starts.append({**at, "jsd": 0.1, "entropy": 0.4, "other_entropy": 0.4, "pair": pair, "sample": case})
        for run, lost in (
            ("cold", nats(case)),
            ("warm", 0.0),
            ("cold, routed warm", nats(case) / 2),
            ("warm, routed cold", 0),
        ):
            for step in range(1, 4):
                less = lost * (2 if step == 1 else 1)
                course = {"run": run, "step": step, "right": float(step > 1), "log_probability": -0.1 - less}
                courses.append({**course, "sample": case})
    return {"samples": pd.DataFrame(rows), "starts": pd.DataFrame(starts), "courses": pd.DataFrame(courses)}


def concluded(tables: dict[str, pd.DataFrame]) -> Conclusion:
    return conclude(tables, MADE_UP, models.any_model())


def example() -> tuple[Config, Conclusion]:
    return MADE_UP, concluded(made_up())


def noise(rng: np.random.Generator) -> Conclusion:
    """Slips are routed as like the one as the other, nothing goes through it, and cold starts are as warm ones."""
    overlap = [lambda _: float(rng.normal(0.6, 0.1)) for _ in range(4)]
    slip, alike, cold, warm = overlap
    nats = [float(number) for number in rng.normal(0, 0.1, MADE_UP.problems)]
    return concluded(made_up(slip, alike, lambda _: float(rng.normal(0, 0.2)), cold, warm, lambda case: nats[case]))


def test_planted_numbers_are_found():
    findings = example()[1].findings
    cases = range(MADE_UP.problems)
    alike = np.mean([0.8 + 0.01 * (case % 4) - 0.6 - 0.01 * (case % 3) for case in cases])
    assert findings.at("alike").mean == pytest.approx(alike)
    assert {findings.finding(name).comparisons for name in ("alike", "undone", "cold")} == {6}
    assert findings.at("slower").mean == pytest.approx(4 / 3 * 0.305)
    assert findings.at("first").mean == pytest.approx(0.305)
    assert findings.at("warmed").mean == pytest.approx(2 / 3 * 0.305)
    assert findings.at("course", run="cold", step=1).mean == 0.0
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
    tables["samples"] = rows[~((rows["sample"] == 0) & (rows["kind"] == "token") & (rows["token"] == TOKENS - 1))]
    findings = concluded(tables).findings
    assert "token" not in findings
    assert "overlap_last" in findings


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"slip": lambda _: 0.95}, "are routed rather as after the sound draft than as where that value is right"),
        ({"undone": lambda _: -0.3}, "is held back by the routers"),
        ({"undone": lambda _: 0.009}, "does not detectably go through the routers"),
        ({"cold": lambda _: 0.9}, "is routed more like"),
        ({"nats": lambda case: -0.3 - case / 100}, "are likelier after a cold start"),
        ({"nats": lambda case: 0.3 + case / 100}, "loses more to a cold start than later ones"),
        ({"nats": lambda case: (case % 2 - 0.5) / 10}, "does not detectably help a cold start"),
    ],
)
def test_the_answer_follows_the_intervals(tables: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, MADE_UP, concluded(made_up(**tables)), tmp_path)


def test_controls_fail_where_they_should():
    tables = made_up(), made_up(off=1e-3), made_up(as_stated=0.4)
    holds = [[control.holds for control in concluded(altered).controls] for altered in tables]
    assert holds == [[True, True], [False, True], [True, False]]
