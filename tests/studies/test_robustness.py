"""The robustness study on tiny random models: which cases there are, what is counted, and what the numbers decide."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.robustness.study as study
from kvprobe.experiments import trials
from kvprobe.experiments.presets import presets
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.faults import Draws
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.faults.strike import corrupt
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import prepare
from kvprobe.report.page import write_report
from kvprobe.stats import wilson
from kvprobe.studies.robustness.analyse import analyse
from kvprobe.studies.robustness.collect import CONTROL, MAIN, NOT_A_NUMBER, PROCEDURE, beside, cases
from kvprobe.studies.robustness.config import Config
from kvprobe.studies.robustness.figures import draw_all
from kvprobe.studies.robustness.narrative import findings, headline, warnings
from kvprobe.studies.robustness.results import accuracy_section, beside_section
from kvprobe.studies.robustness.styles import STYLES
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt
from kvprobe.wording import estimate_of
from tests.models import N_LAYERS
from tests.refusals import refused
from tests.studies.runs import assert_figures, gsm8k_questions, interrupted, run_on

SMALL = Config(tasks=("retrieve",), samples=2, faults=tuple(CATALOGUE), rates=(10.0, 50.0), repeats=2)


@pytest.fixture(scope="module")
def finished(tiny_llama: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_on(tiny_llama, study, SMALL, tmp_path_factory.mktemp("runs"))


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


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_fault_writes_the_parts_that_it_says(tiny_llama: Model, name: str):
    task = find_task("recite")
    item = task.items(1, 0)[0]
    sample = trials.Sample(task, item, 0, prompt(item, tiny_llama.tokenizer))
    cache = tiny_llama.prefill(sample.tokens)
    case = next(case for case in cases(replace(SMALL, timing="once")) if case.labels["fault"] == name)
    struck = replace(case.trial.fault, scope=replace(case.trial.fault.scope, rate=0.5))
    context = prepare(tiny_llama.lanes, cache, [struck], trials.donors(tiny_llama, sample, {struck.lender}))
    damaged, _ = corrupt(cache, struck, [context], [Draws()])
    changed = {
        "k": any(not torch.equal(a, b) for a, b in zip(cache.keys, damaged.keys, strict=True)),
        "v": any(not torch.equal(a, b) for a, b in zip(cache.values, damaged.values, strict=True)),
    }
    only = {"zero-values": "v", "permuted-keys": "k", "shifted": "k", "overlapping": "k"}.get(name)
    assert changed == {"k": only in (None, "k"), "v": only in (None, "v")}


def test_a_run_holds_every_condition_number_and_figure(finished: Run):
    samples = finished.df()
    assert len(samples) == SMALL.samples * (len(cases(SMALL)) + 1)
    task = finished.metrics["tasks"]["retrieve"]
    assert len(task["levels"]) == len(CATALOGUE) * 2
    assert len(task["procedure"]) == 27
    assert_figures(finished, "accuracy_by_rate", "kl_by_rate")
    page = write_report(finished.path, finished.report).read_text()
    assert all(kind.label.replace("&", "&amp;") in page for kind in CATALOGUE.values())


def test_controls_hold_on_a_real_sweep(finished: Run):
    controls = finished.metrics["controls"]
    # Rows of one batch may differ by rounding.
    assert controls["nothing"] == {"rows": 2, "kl": pytest.approx(0.0, abs=1e-6), "same": 2, "holds": True}
    assert controls["nan"] == {"rows": 2, "found": 2, "holds": True}
    assert [each["fault"] for each in controls["reordered"]] == ["permuted", "pointers-swapped"]
    assert all(each["holds"] and each["kl"] < 1e-5 for each in controls["reordered"])
    text = json.dumps(finished.report)
    assert text.count("The control holds.") == 4
    assert "DOES NOT HOLD" not in text


def test_damage_grows_with_the_rate_and_noise_moves_more_than_rounding(finished: Run):
    kl = {(each["fault"], each["rate"]): each["kl"]["mean"] for each in finished.metrics["tasks"]["retrieve"]["levels"]}
    for name in ("gaussian", "zeros", "distractor", "rounded-2-bit"):
        assert kl[name, 50.0] > kl[name, 10.0] > 0
    assert kl["gaussian", 50.0] > kl["rounded-2-bit", 50.0] > kl["rounded-4-bit", 50.0]


def test_a_random_model_is_listed_with_its_baseline_and_faults_are_not_ranked(finished: Run):
    task = finished.metrics["tasks"]["retrieve"]
    assert not task["rankable"]
    assert task["ranking"] is task["cliffs"] is None
    assert "Faults are not ranked on retrieve" in finished.report["answer"]
    assert {each["fault"] for each in task["ranking_kl"]} == {name for name in CATALOGUE if not CATALOGUE[name].control}


def test_the_nan_is_named_and_not_counted_among_rows_that_broke(finished: Run):
    nan = finished.df().query("fault == @NOT_A_NUMBER")
    assert nan["broken"].str.match(rf"[KV] of layer [0-{N_LAYERS - 1}], KV head \d, slot \d+").all()
    assert not nan["right"].any()
    assert nan["kl"].isna().all()
    assert finished.metrics["broken"]["rows"] == 0


def test_an_interrupted_run_goes_on_with_the_same_numbers(
    finished: Run, tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    again, calls = interrupted(lambda: run_on(tiny_llama, study, SMALL, tmp_path), monkeypatch, trials, "answer", at=2)
    assert [sample.number for _, sample, *_ in calls] == [0, 1, 1]
    pd.testing.assert_frame_equal(again.df(), finished.df())
    assert again.metrics == finished.metrics


def test_without_kl_the_study_still_runs_and_says_so(tiny_llama: Model, tmp_path: Path):
    config = Config(
        tasks=("retrieve",), samples=2, faults=("zeros", "permuted"), rates=(50.0,), procedure=0.0, follow=False
    )
    run = run_on(tiny_llama, study, config, tmp_path)
    assert all(each["kl"] is None for each in run.metrics["tasks"]["retrieve"]["levels"])
    assert not (run.path / "figures" / "kl_by_rate.png").exists()
    assert "KL was not measured" in " ".join(run.report["warnings"])
    assert "not measured" in " ".join(_section(run.report, "Controls")["points"])
    assert write_report(run.path, run.report).is_file()


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


def numbers(table: pd.DataFrame, config: Config = MADE_UP, **facts: Any) -> dict[str, Any]:
    return analyse(table, config, [find_task("recite")], **facts)


def said_of(metrics: dict[str, Any]) -> str:
    """All that the report says of what was found, in sentences."""
    return " ".join(findings(metrics))


def graded(fault: str, rate: float, item: int) -> bool:
    """Noise leaves nothing; zeros leave 12 and 8 of 20; distractors 18 and 16; controls all."""
    left = {"gaussian": (0, 0), "zeros": (12, 8), "distractor": (18, 16)}.get(fault, (20, 20))
    return item < left[rate == 50]


def level(metrics: dict[str, Any], fault: str, rate: float) -> dict[str, Any]:
    return next(each for each in metrics["tasks"]["recite"]["levels"] if (each["fault"], each["rate"]) == (fault, rate))


def test_accuracies_and_losses_are_those_of_the_table():
    found = numbers(made_up(graded, MADE_UP, clean=lambda item: item != 19))
    zeros = level(found, "zeros", 10.0)
    expected = wilson(12, 20)
    assert estimate_of(zeros["accuracy"]["exact"]).ends == pytest.approx(expected.ends, rel=1e-12)
    assert zeros["lost"]["exact"]["mean"] == pytest.approx(0.95 - 0.6)
    assert found["tasks"]["recite"]["clean"]["exact"]["mean"] == 0.95
    assert zeros["kl"]["mean"] == pytest.approx(0.1)
    assert zeros["diverged"] == {"low": 3.0, "median": 3.0, "high": 3.0}
    assert level(found, "permuted", 50.0)["diverged"] == {"low": None, "median": None, "high": None}


def test_repeats_of_an_item_do_not_narrow_its_interval():
    once = level(numbers(made_up(graded, MADE_UP)), "zeros", 50.0)
    config = replace(MADE_UP, repeats=4)
    often = level(numbers(made_up(graded, config), config), "zeros", 50.0)
    assert often["rows"] == 4 * once["rows"]
    assert often["accuracy"] == once["accuracy"]
    assert often["lost"] == once["lost"]


def test_faults_are_ranked_by_what_they_cost_and_neighbours_told_apart():
    found = numbers(made_up(graded, MADE_UP))
    ranking = found["tasks"]["recite"]["ranking"]
    assert [each["fault"] for each in ranking] == ["gaussian", "zeros", "distractor"]
    assert [each["harm"]["mean"] for each in ranking] == pytest.approx([1.0, 0.5, 0.15])
    assert all(each["over_next"]["low"] > 0 for each in ranking[:2])
    assert ranking[2]["over_next"] is None
    assert found["tasks"]["recite"]["cliffs"] == {"gaussian": 10.0, "zeros": None, "distractor": None, "permuted": None}
    told = said_of(found)
    assert "the worst of 3 faults is Gaussian (layer), which costs 100.0 points" in told
    assert "the mildest is distractor, for which a loss was not detected (15.0 points" in told
    assert "Accuracy has significantly fallen below half of that at 10 % of Gaussian (layer)" in told
    assert told.count("is found (") == 2
    assert headline(found) == (
        "Recite, 100.0 % (83.9 to 100.0) right with a sound cache: worst is Gaussian (layer) (costs 100.0 points (74.4 "
        "to 100.0)), mildest distractor (for which a loss was not detected (15.0 points (-4.3 to 46.9)))."
    )


def test_the_opposite_order_and_none_at_all_are_worded_too():
    def reversed_order(fault: str, rate: float, item: int) -> bool:
        return item < {"gaussian": 18, "zeros": 12, "distractor": 0}.get(fault, 20)

    assert said_of(numbers(made_up(reversed_order, MADE_UP))).count("is reversed (") == 2
    alike = numbers(made_up(lambda fault, rate, item: item % 2 == 0, MADE_UP))
    assert said_of(alike).count("is not found (") == 2
    unharmed = said_of(numbers(made_up(lambda *_: True, MADE_UP)))
    assert "for which a loss was not detected (0.0 points" in unharmed
    assert "At no measured rate, up to 50 %" in unharmed


def test_a_cliff_needs_more_than_a_point_below_half():
    """9 of 20 is below half, but not significantly; 3 of 20 is."""
    found = numbers(made_up(lambda fault, rate, item: item < (9 if rate == 10 else 3), MADE_UP))
    assert found["tasks"]["recite"]["cliffs"]["zeros"] == 50.0


def test_faults_are_not_ranked_where_the_sound_cache_fails():
    found = numbers(made_up(lambda *_: False, MADE_UP, clean=lambda item: item < 3))
    task = found["tasks"]["recite"]
    assert (task["rankable"], task["ranking"], task["cliffs"]) == (False, None, None)
    assert "the model is right in 15% of its items" in task["too_hard"]
    assert task["ranking_kl"] is not None
    assert "costs" not in said_of(found)
    assert task["too_hard"] in warnings(found, MADE_UP)


def test_the_map_of_losses_stands_under_accuracy_for_tasks_that_the_model_can_do():
    (found,) = accuracy_section(numbers(made_up(graded, MADE_UP)), MADE_UP).maps
    assert list(found.columns) == ["10 %", "50 %"]
    lost = dict(zip(found.rows, found.values, strict=True))
    assert lost[CATALOGUE["gaussian"].label] == pytest.approx([1, 1])
    assert lost[CATALOGUE["zeros"].label] == pytest.approx([0.4, 0.6])
    assert lost[CATALOGUE["distractor"].label] == pytest.approx([0.1, 0.2])
    assert lost[CATALOGUE["permuted"].label] == [0, 0]
    too_hard = numbers(made_up(lambda *_: False, MADE_UP, clean=lambda item: item < 3))
    assert accuracy_section(too_hard, MADE_UP).maps == []


def test_broken_rows_are_wrong_have_no_kl_and_are_reported():
    table = made_up(lambda *_: True, MADE_UP, broken=lambda fault, rate, item: fault == "zeros" and item < 5)
    found = numbers(table)
    zeros = level(found, "zeros", 10.0)
    assert zeros["accuracy"]["exact"]["mean"] == pytest.approx(15 / 20)
    assert (zeros["broken"], zeros["rows"]) == (5, 20)
    assert zeros["kl"]["mean"] == pytest.approx(0.1)
    assert found["broken"]["rows"] == 10
    assert "V of layer 1, KV head 0, slot 7" in found["broken"]["first"]
    assert found["tasks"]["recite"]["unranked_kl"] == ["zeros"]
    assert any("10 of 200 rows" in warning for warning in warnings(found, MADE_UP))


def test_a_fault_that_always_breaks_has_no_kl_at_all():
    found = numbers(made_up(graded, MADE_UP, broken=lambda fault, rate, item: fault == "zeros"))
    assert level(found, "zeros", 50.0)["kl"] is None
    assert level(found, "zeros", 50.0)["accuracy"]["exact"]["mean"] == 0


@pytest.mark.parametrize(
    ("column", "value", "which", "entry"),
    [
        ("kl", 1e-3, "rate == 0", "nothing"),
        ("same", False, "rate == 0", "nothing"),
        ("struck", 4, "rate == 0", "nothing"),
        ("broken", "", "fault == 'nan'", "nan"),
        ("kl", 1e-3, "fault == 'permuted'", "reordered"),
    ],
)
def test_a_control_that_fails_is_said_to_fail(column: str, value: Any, which: str, entry: str):
    table = made_up(graded, MADE_UP)
    assert not any("control" in warning for warning in warnings(numbers(table), MADE_UP))
    table.loc[table.query(which).index[:1], column] = value
    found = numbers(table)
    control = found["controls"][entry]
    assert (control[0] if entry == "reordered" else control)["holds"] is False
    assert any("control does not hold" in warning for warning in warnings(found, MADE_UP))


def test_slots_in_another_order_are_no_control_where_a_window_hides_some():
    table = made_up(graded, MADE_UP, kl=lambda *_: 1.0)
    task = find_task("recite")
    reach = 80 + task.max_new_tokens
    assert numbers(table, window=reach)["controls"]["reordered"][0]["holds"] is True
    assert numbers(table, window=reach - 1)["controls"]["reordered"][0]["holds"] is None


def test_readings_of_the_seeds_procedure_are_held_against_fresh_damage_by_slot():
    config = replace(MADE_UP, procedure=10.0)
    table = made_up(graded, config)
    table.loc[(table["group"] == PROCEDURE) & (table["unit"] == "number"), "score_exact"] = False
    found = numbers(table, config)["tasks"]["recite"]["procedure"]
    beyond = {(each["fault"], each["timing"], each["unit"]): each["beyond"]["mean"] for each in found}
    assert beyond["zeros", "once", "number"] == pytest.approx(0.6)
    assert beyond["zeros", "piling", "layer"] == 0
    assert beyond["zeros", "fresh", "slot"] == 0


def test_few_items_are_warned_of():
    config = replace(MADE_UP, samples=4)
    assert any("4 items" in warning for warning in warnings(numbers(made_up(graded, config), config), config))
    assert warnings(numbers(made_up(graded, MADE_UP)), MADE_UP) == []


def test_reported_numbers_stand_beside_measured_ones_with_their_own_intervals(tmp_path: Path):
    config = replace(
        MADE_UP, tasks=(f"gsm8k:{gsm8k_questions(tmp_path, 20)}",), reported="canarypwn-7b", rates=(10.0, 50.0, 60.0)
    )
    task = find_task(config.tasks[0])
    table = made_up(lambda fault, rate, item: item < 12, config).assign(task=task.name)
    table["score_strict"], table["score_flexible"] = table["score_exact"], True
    found = analyse(table, config, [task])
    source = beside(config, [task])
    assert source is not None
    (shown,) = beside_section(found, config, source, "Qwen/Qwen2.5-7B-Instruct").tables
    rows = {(row[0], row[1]): row[2:] for row in shown.rows}
    assert rows["zeros", "10 %"][0] == "62.0 % (52.2 to 70.9)"
    assert rows["zeros", "10 %"][1].startswith("60.0 % (38.7 to")
    assert rows["zeros", "10 %"][2].startswith("100.0 %")
    assert rows["zeros", "10 %"][3] == "overlap"
    assert rows["Gaussian (layer)", "50 %"][3] == "apart"
    assert ("zeros", "60 %") not in rows
    assert "table 1" in shown.caption
    draw_all(found, config, source, "made up", tmp_path)
    assert "published" in (tmp_path / "accuracy_by_rate.svg").read_text()


def test_a_reported_table_without_any_of_the_faults_is_refused(tmp_path: Path):
    config = Config(tasks=(f"gsm8k:{gsm8k_questions(tmp_path, 2)}",), reported="canarypwn-bands-7b")
    refused(lambda: beside(config, [find_task(config.tasks[0])]), "name one of those")


GSM8K_PRESETS = [name for name in presets() if name.startswith("gsm8k")]


def test_the_presets_of_gsm8k_have_the_settings_of_the_article():
    assert len(GSM8K_PRESETS) == 4
    for name in GSM8K_PRESETS:
        preset = presets()[name]
        config = from_mapping(Config, preset.settings)
        assert config.faults == REPORTED_FAULTS
        assert "canarypwn" in preset.source
        table = beside(config, [find_task("gsm8k")])
        assert table is not None
        assert config.model.endswith(table.model)
        assert config.rates == table.rates
        assert config.samples == (1319 if name.endswith("full") else table.samples)


def test_the_seeds_own_experiment_runs_on_a_model_from_a_folder(tiny_qwen2: Path, tmp_path: Path):
    """As the preset says, but for the model, the items and how many of them."""
    settings = dict(presets()["gsm8k-qwen2.5-1.5b"].settings)
    settings |= {"model": str(tiny_qwen2), "tasks": [f"gsm8k:{gsm8k_questions(tmp_path, 10)}"], "samples": 10}
    run = study.run(from_mapping(Config, settings), tmp_path / "runs")
    (task,) = run.metrics["tasks"].values()
    assert task["clean"]["strict"]["mean"] == 0
    assert not task["rankable"]
    assert "Faults are not ranked on gsm8k" in run.report["answer"]
    (table,) = _section(run.report, "Beside the article's numbers")["tables"]
    assert len(table["rows"]) == 1 + 3 * 10
    assert table["rows"][0][:4] == ["sound cache", "0 %", "66.0 % (56.3 to 74.5)", "0.0 % (0.0 to 27.8)"]
    page = write_report(run.path, run.report).read_text()
    assert "39.0 % (30.0 to 48.8)" in page
    assert run.metrics["controls"]["nothing"]["holds"]


def _section(report: dict[str, Any], title: str) -> dict[str, Any]:
    return next(section for section in report["sections"] if section["title"] == title)
