"""The robustness study on tiny random models: which cases there are, what is counted, and what the numbers decide."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.page import answer, write_page
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.inference.model import Model
from kvprobe.models.geometry import Geometry
from kvprobe.presets import presets
from kvprobe.report.findings import Findings
from kvprobe.stats import Estimate, wilson
from kvprobe.studies import robustness
from kvprobe.studies.robustness import Config
from kvprobe.studies.robustness.collect import CONTROL, MAIN, NOT_A_NUMBER, PROCEDURE, cases, reported_beside
from kvprobe.studies.robustness.conclude import conclude, ranking
from kvprobe.studies.robustness.study import STUDY, STYLES
from kvprobe.tasks.catalogue import find_task
from tests.models import N_LAYERS, any_model
from tests.refusals import refused
from tests.studies.runs import assert_figures, gsm8k_questions, in_steps, page_of

SMALL = Config(tasks=("retrieve",), samples=2, faults=tuple(CATALOGUE), rates=(10.0, 50.0), repeats=2)


@pytest.fixture(scope="module")
def finished(tiny_llama: Model, root: Path) -> Run:
    return robustness.run(SMALL, root, model=tiny_llama)


def test_there_is_a_case_for_each_fault_rate_and_repeat_and_for_each_control():
    labels = pd.DataFrame([dict(case.labels) for case in cases(SMALL)])
    main, procedure = labels[labels["group"] == MAIN], labels[labels["group"] == PROCEDURE]
    assert len(main) == len(main.drop_duplicates(["fault", "rate", "repeat"])) == len(CATALOGUE) * 2 * 2
    assert len(procedure.drop_duplicates(["fault", "timing", "unit", "repeat"])) == 3 * 3 * 3 * 2
    assert set(procedure["rate"]) == {SMALL.procedure}
    assert labels[labels["group"] == CONTROL]["fault"].tolist() == [SMALL.faults[0], NOT_A_NUMBER]
    without = {case.labels["group"] for case in cases(replace(SMALL, procedure=0.0))}
    assert without == {MAIN, CONTROL}


def test_a_fault_strikes_when_and_where_its_labels_say():
    for case in cases(SMALL):
        fault, label = case.trial.fault, case.labels
        when = {"once": (0, False), "fresh": ("every", True), "piling": ("every", False)}[str(label["timing"])]
        assert (fault.at, fault.transient) == when
        assert fault.scope.unit == label["unit"]
        assert case.trial.repeat == label["repeat"]
        if label["fault"] != NOT_A_NUMBER:
            assert fault.scope.rate == pytest.approx(float(label["rate"]) / 100)


@pytest.mark.parametrize("unit", ["slot", "layer", "head", "number"])
def test_pages_keep_their_blocks_and_whole_vectors_their_numbers_whatever_the_unit(unit: str):
    drawn = {str(case.labels["fault"]): case for case in reversed(cases(replace(SMALL, unit=unit, procedure=0.0)))}
    for name in ("pointers-swapped", "pointers-repeated", "foreign-block", "stale-block", "overlapping"):
        assert (drawn[name].trial.fault.scope.unit, drawn[name].trial.fault.scope.block) == ("slot", 16)
    for name in ("permuted", "permuted-keys", "shifted"):
        assert drawn[name].trial.fault.scope.unit == ("slot" if unit == "number" else unit)
    for name in (*REPORTED_FAULTS, "fp8-scale", "rounded-2-bit"):
        assert drawn[name].trial.fault.scope.unit == unit


def test_every_named_fault_has_a_line_style_of_its_own():
    assert list(STYLES) == list(CATALOGUE)
    assert len(set(STYLES.values())) == len(STYLES)


def test_a_run_holds_every_condition_number_and_figure(finished: Run):
    samples, findings = finished.df(), finished.findings
    assert len(samples) == SMALL.samples * (len(cases(SMALL)) + 1)
    for name in ("accuracy", "lost", "same", "kl"):
        assert len(findings[findings["name"] == name]) == len(CATALOGUE) * 2
    assert len(findings[findings["name"] == "reading"]) == 27
    assert_figures(finished, "accuracy_by_rate", "kl_by_rate")
    page = write_page(STUDY, finished).read_text()
    assert all(kind.label.replace("&", "&amp;") in page for kind in CATALOGUE.values())


def test_controls_hold_on_a_real_sweep(finished: Run):
    controls = Conclusion.of(finished.metrics).controls
    # Nothing struck, a NaN, and two faults that only reorder.
    assert [control.holds for control in controls] == [True] * 4
    page = write_page(STUDY, finished).read_text()
    assert page.count("<b>Holds.</b>") == 4
    assert "A control fails" not in page


def test_damage_grows_with_the_rate_and_noise_moves_more_than_rounding(finished: Run):
    def kl(fault: str, rate: float) -> float:
        return findings_of(finished).at("kl", task="retrieve", fault=fault, rate=rate).mean

    for name in ("gaussian", "zeros", "distractor", "rounded-2-bit"):
        assert kl(name, 50.0) > kl(name, 10.0) > 0
    assert kl("gaussian", 50.0) > kl("rounded-2-bit", 50.0) > kl("rounded-4-bit", 50.0)


def test_a_random_model_is_listed_with_its_baseline_and_faults_are_not_ranked(finished: Run):
    findings = findings_of(finished)
    assert findings.at("sound", task="retrieve").mean == 0
    assert not findings.where("harm")
    assert not findings.where("cliff")
    assert "Faults are not ranked on retrieve" in answer(STUDY, finished)
    assert set(findings.values("harm_kl", "fault")) == {name for name in CATALOGUE if not CATALOGUE[name].control}


def test_the_nan_is_named_and_not_counted_among_rows_that_broke(finished: Run):
    nan = finished.df().query("fault == @NOT_A_NUMBER")
    assert nan["broken"].str.match(rf"[KV] of layer [0-{N_LAYERS - 1}], KV head \d, slot \d+").all()
    assert not nan["right"].any()
    assert nan["kl"].isna().all()
    assert not any("were not finite" in warning for warning in Conclusion.of(finished.metrics).warnings)


def test_an_interrupted_run_goes_on_with_the_same_numbers(finished: Run, tiny_llama: Model, tmp_path: Path):
    again = in_steps(lambda: robustness.run(SMALL, tmp_path, model=tiny_llama))
    pd.testing.assert_frame_equal(again.df(), finished.df())
    assert again.metrics == finished.metrics


def test_without_kl_the_study_still_runs_and_says_so(tiny_llama: Model, tmp_path: Path):
    config = Config(
        tasks=("retrieve",), samples=2, faults=("zeros", "permuted"), rates=(50.0,), procedure=0.0, follow=False
    )
    run = robustness.run(config, tmp_path, model=tiny_llama)
    assert not findings_of(run).where("kl")
    assert not (run.path / "figures" / "kl_by_rate.png").exists()
    page = (run.path / "report.html").read_text()
    assert "KL was not measured in this run" in page
    assert "KL is not measured (allowed" in page


def findings_of(run: Run) -> Findings:
    return Conclusion.of(run.metrics).findings


Right = Callable[[str, float, int], bool]


def made_up(
    right: Right,
    config: Config,
    *,
    clean: Callable[[int], bool] = lambda item: True,
    kl: Callable[[str, float, int], float] = lambda fault, rate, item: rate / 100,
    broken: Callable[[str, float, int], bool] = lambda *_: False,
) -> pd.DataFrame:
    """A table of `collect` on recite, from who answers rightly: by fault, rate in percent and item."""
    rows = []
    for item in range(config.samples):
        known = {"task": "recite", "sample": item, "item": f"recite-{item}", "slots": 80, "answer": "a"}
        sound = {"broken": "", "kl": 0.0, "same": True, "diverged": -1, "struck": 0, "text": "said"}
        rows.append({**known, **sound, "case": -1, "score_exact": clean(item), "right": clean(item)})
        for number, case in enumerate(cases(config)):
            fault, rate = str(case.labels["fault"]), float(case.labels.get("rate", 0.0))
            nothing = rate == 0 and fault != NOT_A_NUMBER
            breaks = fault == NOT_A_NUMBER or (rate > 0 and broken(fault, rate, item))
            correct = clean(item) if nothing else right(fault, rate, item)
            same = nothing or CATALOGUE[fault].control if fault in CATALOGUE else False
            rows.append(
                {
                    **known,
                    **case.labels,
                    "case": number,
                    "score_exact": correct,
                    "right": correct and not breaks,
                    "same": same,
                    "diverged": -1 if same else 3,
                    "struck": 0 if nothing else 12,
                    "broken": "V of layer 1, KV head 0, slot 7" if breaks else "",
                    "kl": np.nan if breaks else 0.0 if same else kl(fault, rate, item),
                    "text": "said",
                }
            )
    return pd.DataFrame(rows)


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
    """For the tests of all declared studies."""
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
    assert at(conclusion, "accuracy", **zeros).ends == pytest.approx(wilson(12, 20).ends, rel=1e-12)
    assert at(conclusion, "lost", **zeros).mean == pytest.approx(0.95 - 0.6)
    assert at(conclusion, "sound").mean == 0.95
    assert at(conclusion, "kl", **zeros).mean == pytest.approx(0.1)
    for quartile in ("low", "median", "high"):
        assert at(conclusion, "diverged", **zeros, quartile=quartile).mean == 3
        assert at(conclusion, "diverged", fault="permuted", rate=50.0, quartile=quartile).unknown


def test_repeats_of_an_item_do_not_narrow_its_interval():
    once, config, zeros = (
        numbers(made_up(graded, MADE_UP)),
        replace(MADE_UP, repeats=4),
        {"fault": "zeros", "rate": 50.0},
    )
    often = numbers(made_up(graded, config), config)
    assert at(often, "rows", **zeros).mean == 4 * at(once, "rows", **zeros).mean
    for name in ("accuracy", "lost"):
        assert at(often, name, **zeros).record() == at(once, name, **zeros).record()


def test_faults_are_ranked_by_what_they_cost_and_neighbours_compared(tmp_path: Path):
    conclusion = numbers(made_up(graded, MADE_UP))
    order = ranking(conclusion.findings, "harm", "recite")
    assert [finding.keys["fault"] for finding in order] == ["gaussian", "zeros", "distractor"]
    assert [finding.value.mean for finding in order] == pytest.approx([1.0, 0.5, 0.15])
    assert {finding.comparisons for finding in order} == {3}
    assert at(conclusion, "harm_over_next", fault="gaussian").above()
    assert at(conclusion, "harm_over_next", fault="zeros").above()
    assert conclusion.findings.get("harm_over_next", task="recite", fault="distractor") is None
    assert at(conclusion, "cliff", fault="gaussian").mean == 10
    assert all(at(conclusion, "cliff", fault=name).unknown for name in ("zeros", "distractor", "permuted"))
    page = page_of(STUDY, MADE_UP, conclusion, tmp_path)
    assert answer(STUDY, page) == (
        "On recite (100.0 % (83.9 to 100.0) right with a sound cache) the worst fault is Gaussian (layer), which costs "
        "100.0 points (74.4 to 100.0); the mildest is distractor, for which a loss was not detected (15.0 points (-4.3 "
        "to 46.9))."
    )


def verdicts(conclusion: Conclusion) -> dict[tuple[Any, Any], str]:
    """What is claimed of each contrast in accuracy."""
    findings = conclusion.findings
    return {
        (finding.keys["first"], finding.keys["second"]): STUDY.claim(findings, "contrast", **finding.keys)
        for finding in findings.where("contrast")
    }


def test_the_order_of_the_article_the_opposite_and_none_are_said_in_words():
    def reversed_order(fault: str, rate: float, item: int) -> bool:
        return item < {"gaussian": 18, "zeros": 12, "distractor": 0}.get(fault, 20)

    pairs = [("gaussian", "zeros"), ("zeros", "distractor")]
    claims = verdicts(numbers(made_up(graded, MADE_UP)))
    assert [claims[pair] for pair in pairs] == ["Gaussian (layer) costs more", "zeros costs more"]
    claims = verdicts(numbers(made_up(reversed_order, MADE_UP)))
    assert [claims[pair] for pair in pairs] == ["zeros costs more", "distractor costs more"]
    claims = verdicts(numbers(made_up(lambda fault, rate, item: item % 2 == 0, MADE_UP)))
    assert [claims[pair] for pair in pairs] == ["not detected"] * 2


def test_a_cliff_needs_more_than_a_point_below_half():
    """9 of 20 is below half, but not significantly; 3 of 20 is."""
    conclusion = numbers(made_up(lambda fault, rate, item: item < (9 if rate == 10 else 3), MADE_UP))
    assert at(conclusion, "cliff", fault="zeros").mean == 50.0


def test_faults_are_not_ranked_where_the_sound_cache_fails(tmp_path: Path):
    conclusion = numbers(made_up(lambda *_: False, MADE_UP, clean=lambda item: item < 3))
    assert not conclusion.findings.where("harm")
    assert not conclusion.findings.where("cliff")
    assert conclusion.findings.where("harm_kl")
    run = page_of(STUDY, MADE_UP, conclusion, tmp_path)
    assert "the model is right in 15% of its items" in answer(STUDY, run)
    assert "costs" not in answer(STUDY, run)
    # No map of losses either.
    assert "right answers lost, as a share of all" not in (run.path / "report.html").read_text()


def test_the_map_of_losses_stands_under_accuracy_for_tasks_that_the_model_can_do(tmp_path: Path):
    conclusion = numbers(made_up(graded, MADE_UP))
    assert "right answers lost, as a share of all" in page_of(STUDY, MADE_UP, conclusion, tmp_path).read("report.html")
    for fault, losses in {
        "gaussian": (1, 1),
        "zeros": (0.4, 0.6),
        "distractor": (0.1, 0.2),
        "permuted": (0, 0),
    }.items():
        lost = [at(conclusion, "lost", fault=fault, rate=rate).mean for rate in MADE_UP.rates]
        assert lost == pytest.approx(losses)


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


def test_a_fault_that_always_breaks_has_no_kl_at_all():
    conclusion = numbers(made_up(graded, MADE_UP, broken=lambda fault, rate, item: fault == "zeros"))
    assert conclusion.findings.get("kl", task="recite", fault="zeros", rate=50.0) is None
    assert at(conclusion, "accuracy", fault="zeros", rate=50.0).mean == 0


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
    assert [control.holds for control in numbers(table).controls] == [True] * 3
    table.loc[table.query(which).index[:1], column] = value
    assert [control.holds for control in numbers(table).controls] == [number != place for number in range(3)]


def test_slots_in_another_order_are_no_control_where_a_window_hides_some(monkeypatch: pytest.MonkeyPatch):
    table = made_up(graded, MADE_UP, kl=lambda *_: 1.0)
    reach = 80 + find_task("recite").max_new_tokens
    for window, holds in ((reach, True), (reach - 1, None)):
        monkeypatch.setattr(Geometry, "shortest_window", window)
        assert numbers(table).controls[2].holds is holds


def test_readings_of_the_seeds_procedure_are_held_against_fresh_damage_by_slot():
    config = replace(MADE_UP, procedure=10.0)
    table = made_up(graded, config)
    table.loc[(table["group"] == PROCEDURE) & (table["unit"] == "number"), "score_exact"] = False
    conclusion = numbers(table, config)
    for (timing, drawn), lost in {("once", "number"): 0.6, ("piling", "layer"): 0, ("fresh", "slot"): 0}.items():
        reading = at(conclusion, "reading_lost", fault="zeros", timing=timing, drawn=drawn)
        assert reading.mean == pytest.approx(lost)


def test_few_items_are_warned_of():
    config = replace(MADE_UP, samples=4)
    assert any("4 items" in warning for warning in numbers(made_up(graded, config), config).warnings)
    assert numbers(made_up(graded, MADE_UP)).warnings == []


def test_reported_numbers_stand_beside_measured_ones_with_their_own_intervals(tmp_path: Path):
    config = replace(
        MADE_UP, tasks=(f"gsm8k:{gsm8k_questions(tmp_path, 20)}",), reported="canarypwn-7b", rates=(10.0, 50.0, 60.0)
    )
    task = find_task(config.tasks[0])
    table = made_up(lambda fault, rate, item: item < 12, config).assign(task=task.name)
    table["score_strict"], table["score_flexible"] = table["score_exact"], True
    conclusion = numbers(table, config)
    run = page_of(STUDY, config, conclusion, tmp_path, drawn=True)
    rows = [re.findall("<td>(.*?)</td>", row) for row in run.read("report.html").split("<tr>")]
    beside = {(row[0], row[1]): row[2:] for row in rows if len(row) == 5}
    assert beside["zeros", "10 %"] == ["62.0 % (52.2 to 70.9)", "60.0 % (38.7 to 78.1)", "overlap"]
    assert beside["Gaussian (layer)", "50 %"][2] == "apart"
    assert ("zeros", "60 %") not in beside
    assert "(flexible)" in run.read("report.html")
    assert (
        conclusion.findings.at("accuracy_also", task=task.name, fault="zeros", rate=10.0, scorer="flexible").mean == 1
    )
    assert "table 1" in run.read("report.html")
    assert "published" in run.read("figures/accuracy_by_rate.svg")


def test_a_reported_table_without_any_of_the_faults_is_refused(tmp_path: Path):
    config = Config(tasks=(f"gsm8k:{gsm8k_questions(tmp_path, 2)}",), reported="canarypwn-bands-7b")
    refused(lambda: reported_beside(config, [find_task(config.tasks[0])]), "name one of those")


GSM8K_PRESETS = [name for name in presets() if name.startswith("gsm8k")]


def test_the_presets_of_gsm8k_have_the_settings_of_the_article():
    assert len(GSM8K_PRESETS) == 4
    for name in GSM8K_PRESETS:
        preset = presets()[name]
        config = from_mapping(Config, preset.settings)
        assert config.faults == REPORTED_FAULTS
        assert "canarypwn" in preset.source
        table = reported_beside(config, [find_task("gsm8k")])
        assert table is not None
        assert config.model.endswith(table.model)
        assert config.rates == table.rates
        assert config.samples == (1319 if name.endswith("full") else table.samples)


def test_the_seeds_own_experiment_runs_on_a_model_from_a_folder(tiny_qwen2: Path, tmp_path: Path):
    """As the preset says, but for the model, the items and how many of them."""
    settings = dict(presets()["gsm8k-qwen2.5-1.5b"].settings)
    settings |= {"model": str(tiny_qwen2), "tasks": [f"gsm8k:{gsm8k_questions(tmp_path, 10)}"], "samples": 10}
    run = robustness.run(from_mapping(Config, settings), tmp_path / "runs")
    findings = findings_of(run)
    (task,) = findings.values("sound", "task")
    assert findings.at("sound", task=task).mean == 0
    assert "Faults are not ranked on gsm8k" in answer(STUDY, run)
    page = (run.path / "report.html").read_text()
    assert page.count("<td>overlap</td>") + page.count("<td>apart</td>") == 1 + 3 * 10
    for cell in ("66.0 % (56.3 to 74.5)", "0.0 % (0.0 to 27.8)", "39.0 % (30.0 to 48.8)"):
        assert cell in page
    assert Conclusion.of(run.metrics).controls[0].holds
