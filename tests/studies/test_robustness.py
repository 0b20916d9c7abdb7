"""The robustness study on tiny random models: which cases there are, what is counted, and what the numbers decide."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.models.geometry import Geometry
from kvprobe.stats import Estimate, binomial
from kvprobe.studies.robustness import Config
from kvprobe.studies.robustness.collect import CONTROL, MAIN, NOT_A_NUMBER, PROCEDURE, cases
from kvprobe.studies.robustness.conclude import conclude
from kvprobe.studies.robustness.study import STUDY
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.recite import Recite
from tests.experiments.made_up import page_of
from tests.inference.made_up import made_up_answers
from tests.models import N_LAYERS, any_model
from tests.tasks.made_up import gsm8k_questions

SMALL = Config(tasks=("retrieve", "recite"), samples=2, faults=tuple(CATALOGUE), rates=(10.0, 50.0))
MODEL, HOLD = "tiny_llama", [True, True, True, True]


@pytest.fixture(autouse=True, scope="module")
def short_answers() -> Iterator[None]:
    """A random model recites no list, so that it need not be given room for one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recite, "max_new_tokens", 6)
        yield


def test_there_is_a_case_for_each_fault_rate_repeat_and_control_and_it_strikes_when_and_where_its_labels_say():
    labels = pd.DataFrame([dict(case.labels) for case in cases(replace(SMALL, repeats=2))])
    main, procedure = labels[labels["group"] == MAIN], labels[labels["group"] == PROCEDURE]
    assert len(main) == len(main.drop_duplicates(["fault", "rate", "repeat"])) == len(CATALOGUE) * 2 * 2
    assert len(procedure.drop_duplicates(["fault", "timing", "unit", "repeat"])) == 3 * 3 * 3 * 2
    assert set(procedure["rate"]) == {SMALL.procedure}
    assert labels[labels["group"] == CONTROL]["fault"].tolist() == [SMALL.faults[0], NOT_A_NUMBER]
    assert {case.labels["group"] for case in cases(replace(SMALL, procedure=0.0))} == {MAIN, CONTROL}
    for case in cases(replace(SMALL, repeats=2)):
        fault, label = case.trial.fault, case.labels
        when = {"once": (0, False), "fresh": ("every", True), "piling": ("every", False)}[str(label["timing"])]
        assert (fault.at, fault.transient) == when
        assert (fault.scope.unit, case.trial.repeat) == (label["unit"], label["repeat"])
        if label["fault"] != NOT_A_NUMBER:
            assert fault.scope.rate == pytest.approx(float(label["rate"]) / 100)


def test_a_run_holds_every_condition_its_damage_grows_with_the_rate_and_its_controls_hold(finished: Run):
    samples, conclusion = finished.df(), Conclusion.of(finished.metrics)
    findings = conclusion.findings
    assert samples.groupby("sample").size().tolist() == [len(cases(SMALL)) + 1] * 4
    for fault in ("gaussian", "zeros", "distractor", "rounded-2-bit"):
        seldom, often = (findings.at("kl", task="retrieve", fault=fault, rate=rate).mean for rate in SMALL.rates)
        assert often > seldom > 0
    nan = samples.query("fault == @NOT_A_NUMBER")
    assert nan["broken"].str.match(rf"[KV] of layer [0-{N_LAYERS - 1}], KV head \d, slot \d+").all()
    assert nan["kl"].isna().all()
    assert not any("were not finite" in warning for warning in conclusion.warnings)
    # A random model cannot do the task: its faults are ranked by KL alone.
    assert not findings.where("harm")
    assert set(findings.values("harm_kl", "fault")) == {name for name in CATALOGUE if not CATALOGUE[name].control}


Right = Callable[[str, float, int], bool]
BROKEN = {"right": False, "broken": "V of layer 1, KV head 0, slot 7", "kl": np.nan}


def made_up(
    right: Right,
    config: Config,
    *,
    clean: Callable[[int], bool] = lambda item: True,
    kl: Callable[[str, float, int], float] = lambda fault, rate, item: rate / 100,
    broken: Callable[[str, float, int], bool] = lambda *_: False,
) -> pd.DataFrame:
    """A table of `collect` on recite, from who answers rightly: by fault, rate in percent and item."""

    def became(labels: dict[str, Any], item: int) -> dict[str, Any]:
        place = (labels["fault"], labels.get("rate", 0.0), item)
        nan = labels["fault"] == NOT_A_NUMBER
        if labels.get("rate") == 0:
            return {"struck": 0}
        if not nan and CATALOGUE[labels["fault"]].control:
            return {"right": right(*place)}
        answered = {"right": right(*place), "same": False, "diverged": 3, "kl": kl(*place)}
        return answered | (BROKEN if nan or broken(*place) else {})

    table = made_up_answers("recite", config.samples, lambda _: cases(config), clean, became)
    return table.assign(score_exact=table["right"])


MADE_UP = Config(
    tasks=("recite",),
    samples=20,
    faults=("gaussian", "zeros", "distractor", "permuted"),
    rates=(10.0, 50.0),
    procedure=0.0,
)


def numbers(table: pd.DataFrame, config: Config = MADE_UP) -> Conclusion:
    return conclude(table, config, any_model())


def example() -> tuple[Config, Conclusion]:
    config = replace(MADE_UP, procedure=10.0)
    table = made_up(graded, config, broken=lambda fault, rate, item: fault == "distractor" and item == 0)
    return config, numbers(table, config)


def noise(rng: np.random.Generator) -> Conclusion:
    """Every answer is right as often as the sound cache's, and no fault moves more than another."""
    config = replace(
        MADE_UP, procedure=10.0, faults=("gaussian", "gaussian-channel", "zeros", "zero-values", "distractor")
    )
    able = rng.uniform(0.3, 1.0, config.samples)
    table = made_up(
        lambda fault, rate, item: bool(rng.random() < able[item]),
        config,
        clean=lambda item: bool(rng.random() < able[item]),
        kl=lambda fault, rate, item: float(rng.gamma(2.0) * able[item]),
    )
    return numbers(table, config)


def at(conclusion: Conclusion, name: str, **keys: Any) -> Estimate:
    return conclusion.findings.at(name, task="recite", **keys)


def graded(fault: str, rate: float, item: int) -> bool:
    """Noise leaves nothing; zeros leave 12 and 8 of 20; distractors 18 and 16; controls all."""
    left = {"gaussian": (0, 0), "zeros": (12, 8), "distractor": (18, 16)}.get(fault, (20, 20))
    return item < left[rate == 50]


def test_accuracies_and_losses_are_those_of_the_table():
    conclusion = numbers(made_up(graded, MADE_UP, clean=lambda item: item != 19))
    zeros = {"fault": "zeros", "rate": 10.0}
    assert at(conclusion, "accuracy", **zeros).ends == pytest.approx(binomial(12, 20).ends, rel=1e-12)
    assert at(conclusion, "lost", **zeros).mean == pytest.approx(0.95 - 0.6)
    assert at(conclusion, "sound").mean == 0.95
    assert at(conclusion, "kl", **zeros).mean == pytest.approx(0.1)
    for quartile in ("low", "median", "high"):
        assert at(conclusion, "diverged", **zeros, quartile=quartile).mean == 3
        assert at(conclusion, "diverged", fault="permuted", rate=50.0, quartile=quartile).unknown


def test_faults_are_ranked_by_what_they_cost_and_neighbours_compared(tmp_path: Path):
    conclusion = numbers(made_up(graded, MADE_UP))
    assert conclusion.warnings == []
    costs = {finding.keys["fault"]: finding for finding in conclusion.findings.where("harm")}
    assert {fault: cost.value.mean for fault, cost in costs.items()} == pytest.approx(
        {"gaussian": 1.0, "zeros": 0.5, "distractor": 0.15}
    )
    assert {cost.comparisons for cost in costs.values()} == {3}
    assert at(conclusion, "harm_over_next", fault="gaussian").above()
    assert at(conclusion, "harm_over_next", fault="zeros").above()
    assert conclusion.findings.get("harm_over_next", task="recite", fault="distractor") is None
    # 8 of 20 after zeros is below half, but not significantly.
    assert at(conclusion, "cliff", fault="gaussian").mean == 10
    assert all(at(conclusion, "cliff", fault=name).unknown for name in ("zeros", "distractor", "permuted"))
    assert answer(STUDY, page_of(STUDY, MADE_UP, conclusion, tmp_path)) == (
        "On recite (100.0 % (83.2 to 100.0) right with a sound cache) the worst fault is Gaussian (layer), which costs "
        "100.0 points (57.4 to 100.0). The mildest is distractor, for which a loss was not detected (15.0 points (-4.3 "
        "to 49.1))."
    )


@pytest.mark.parametrize(
    ("left", "claims"),
    [
        ((0, 10, 17), ["Gaussian (layer) costs more", "zeros costs more"]),
        ((18, 12, 0), ["zeros costs more", "distractor costs more"]),
        ((10, 10, 10), ["not detected"] * 2),
    ],
)
def test_the_order_of_the_article_the_opposite_and_none_are_said_in_words(left: tuple[int, ...], claims: list[str]):
    of = dict(zip(REPORTED_FAULTS, left, strict=True))
    findings = numbers(made_up(lambda fault, rate, item: item < of.get(fault, 20), MADE_UP)).findings
    pairs = pairwise(REPORTED_FAULTS)
    assert [STUDY.claim(findings, "contrast", task="recite", first=one, second=two) for one, two in pairs] == claims


def test_faults_are_not_ranked_where_the_sound_cache_fails(tmp_path: Path):
    conclusion = numbers(made_up(lambda *_: False, MADE_UP, clean=lambda item: item < 3))
    assert not conclusion.findings.where("harm") + conclusion.findings.where("cliff")
    assert conclusion.findings.where("harm_kl")
    said = answer(STUDY, page_of(STUDY, MADE_UP, conclusion, tmp_path))
    assert "the model is right in 15% of its items" in said
    assert "costs" not in said


def test_without_kl_there_is_no_figure_of_it_and_the_page_says_so(tmp_path: Path):
    config = replace(MADE_UP, follow=False)
    run = page_of(STUDY, config, numbers(made_up(graded, config).assign(kl=np.nan), config), tmp_path, drawn=True)
    assert not list(tmp_path.rglob("kl_by_rate.png"))
    assert "KL was not measured in this run" in run.read("report.html")


def test_broken_rows_are_wrong_have_no_kl_and_are_reported():
    table = made_up(lambda *_: True, MADE_UP, broken=lambda fault, rate, item: fault == "zeros" and item < 5)
    conclusion, zeros = numbers(table), {"fault": "zeros", "rate": 10.0}
    assert at(conclusion, "accuracy", **zeros).mean == pytest.approx(15 / 20)
    assert (at(conclusion, "broken_rows", **zeros).mean, at(conclusion, "rows", **zeros).mean) == (5, 20)
    assert at(conclusion, "kl", **zeros).mean == pytest.approx(0.1)
    assert conclusion.facts["tasks"]["recite"]["unranked_kl"] == ["zeros"]
    (warning,) = conclusion.warnings
    assert "10 of 200 rows" in warning
    assert "V of layer 1, KV head 0, slot 7" in warning
    always = numbers(made_up(graded, MADE_UP, broken=lambda fault, rate, item: fault == "zeros"))
    assert always.findings.get("kl", task="recite", **zeros) is None
    assert at(always, "accuracy", **zeros).mean == 0


@pytest.mark.parametrize(
    ("column", "value", "which", "place"),
    [
        ("kl", 1e-3, "rate == 0", 0),
        ("same", False, "rate == 0", 0),
        ("struck", 4, "rate == 0", 0),
        ("broken", "", "fault == 'nan'", 1),
        ("kl", 1e-3, "fault == 'permuted'", 2),
    ],
)
def test_a_control_that_fails_is_said_to_fail(column: str, value: Any, which: str, place: int):
    table = made_up(graded, MADE_UP)
    table.loc[table.query(which).index[:1], column] = value
    assert [control.holds for control in numbers(table).controls] == [number != place for number in range(3)]


def test_slots_in_another_order_are_no_control_where_a_window_hides_some(monkeypatch: pytest.MonkeyPatch):
    table = made_up(graded, MADE_UP, kl=lambda *_: 1.0)
    reach = 101 + find_task("recite").max_new_tokens
    for window, holds in ((reach, True), (reach - 1, None)):
        monkeypatch.setattr(Geometry, "shortest_window", window)
        assert numbers(table).controls[2].holds is holds


def test_readings_of_the_articles_procedure_are_held_against_fresh_damage_by_slot():
    config = replace(MADE_UP, procedure=10.0)
    table = made_up(graded, config)
    table.loc[(table["group"] == PROCEDURE) & (table["unit"] == "number"), "score_exact"] = False
    conclusion = numbers(table, config)
    for (timing, drawn), lost in {("once", "number"): 0.6, ("piling", "layer"): 0, ("fresh", "slot"): 0}.items():
        reading = at(conclusion, "reading_lost", fault="zeros", timing=timing, drawn=drawn)
        assert reading.mean == pytest.approx(lost)


def test_reported_numbers_stand_beside_measured_ones_with_their_own_intervals(tmp_path: Path):
    task = f"gsm8k:{gsm8k_questions(tmp_path, 20)}"
    config = replace(MADE_UP, tasks=(task,), reported="canarypwn-7b", rates=(10.0, 50.0, 60.0), procedure=10.0)
    table = made_up(lambda fault, rate, item: item < 12, config).assign(
        task=find_task(task).name, score_strict=True, score_numeric=True
    )
    conclusion = numbers(table.rename(columns={"score_exact": "score_flexible"}), config)
    run = page_of(STUDY, config, conclusion, tmp_path, drawn=True)
    rows = [re.findall("<td>(.*?)</td>", row) for row in run.read("report.html").split("<tr>")]
    beside = {(row[0], row[1]): row[2:] for row in rows if len(row) == 5}
    assert beside["zeros", "10 %"] == ["62.0 % (51.7 to 71.5)", "60.0 % (36.1 to 80.9)", "overlap"]
    assert beside["Gaussian (layer)", "50 %"][2] == "apart"
    assert [row[-1] for row in rows if len(row) == 8 and row[0] == "zeros"] == ["62.0 % (51.7 to 71.5)"] * 9
    assert ("zeros", "60 %") not in beside
    assert "(flexible)" in run.read("report.html")
    assert "<td>strict</td>" in run.read("report.html")
    also = conclusion.findings.where("accuracy_also", fault="zeros", rate=10.0, scorer="strict")
    assert [finding.value.mean for finding in also] == [1]
    assert "published" in run.read("figures/accuracy_by_rate.svg")
