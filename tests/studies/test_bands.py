"""The band study: which rows are struck where, what its numbers say of tables with known answers, and whole runs on
tiny models."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvprobe.experiments.trials as trials
import kvprobe.studies.bands.study as study
from kvprobe.experiments.presets import presets
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.faults import Gaussian
from kvprobe.inference.model import Model
from kvprobe.report.page import write_report
from kvprobe.stats import Estimate, wilson
from kvprobe.studies.bands.analyse import analyse, newcombe, spearman, told, verdict
from kvprobe.studies.bands.collect import CONTROL, CUTS, SINGLES, cases, cut_bands, names_of, single_bands
from kvprobe.studies.bands.config import BANDS, NOISES, Config
from kvprobe.studies.bands.figures import BAND_STYLES, NOISE_NAMES, NOISE_STYLES, layer_map
from kvprobe.studies.bands.narrative import findings, warnings
from kvprobe.studies.bands.results import seed_section
from kvprobe.tasks.gsm8k import GSM8K
from kvprobe.tasks.retrieve import Retrieve
from kvprobe.tasks.task import prompt
from kvprobe.text.transcript import Transcript
from kvprobe.wording import estimate_of
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused
from tests.studies.runs import assert_figures, gsm8k_questions, interrupted, run_on

QUESTIONS = ("What is the name of the house?", "Who sat there?", "Where did the ship go?", "How many are there?")


def said_of(task: Any) -> str:
    """All that the report says of a task in sentences."""
    return " ".join(findings(task, MADE_UP))


# --- which rows are struck where


def test_bands_cover_the_layers_once_under_the_names_of_the_reported_table():
    found = {band.name: band.layers for band in cut_bands(Config(), 28)}
    assert found == {
        "quarter 1": range(0, 7),
        "quarter 2": range(7, 14),
        "quarter 3": range(14, 21),
        "quarter 4": range(21, 28),
        "half 1": range(0, 14),
        "half 2": range(14, 28),
        "all": range(0, 28),
    }
    assert [(band.name, list(band.layers)) for band in single_bands(3)] == [
        ("layer 0", [0]),
        ("layer 1", [1]),
        ("layer 2", [2]),
    ]


def test_every_band_meets_every_noise_part_and_rate_once_and_a_control_comes_first():
    every = cases(Config(rates=(4.0, 1.0)), 30)
    labels = pd.DataFrame([case.labels for case in every])
    assert labels["group"].value_counts().to_dict() == {SINGLES: 30 * 4 * 3, CUTS: 7 * 4 * 3 * 2, CONTROL: 1}
    assert not labels.duplicated().any()
    assert labels.iloc[0]["group"] == CONTROL
    for case in every:
        fault = case.trial.fault
        assert isinstance(fault, Gaussian)
        assert fault.matched == case.labels["noise"]
        assert fault.scope.parts == case.labels["parts"]
        assert fault.scope.rate == pytest.approx(float(case.labels["rate"]) / 100)
        assert fault.scope.layers == tuple(range(int(case.labels["first"]), int(case.labels["last"]) + 1))
    assert every[0].trial.fault.scope.rate == 0
    assert not [case for case in cases(Config(single=0.0), 30) if case.labels["group"] == SINGLES]


@pytest.mark.parametrize(
    ("timing", "at", "transient"), [("once", 0, False), ("fresh", "every", True), ("piling", "every", False)]
)
def test_timing_says_when_noise_is_drawn_and_whether_it_stays(timing: str, at: int | str, transient: bool):
    faults = {(case.trial.fault.at, case.trial.fault.transient) for case in cases(Config(timing=timing), 4)}
    assert faults == {(at, transient)}


# --- whole runs on a tiny model


@pytest.fixture(scope="module")
def deep() -> Model:
    """Four layers, so that there are quarters, and many tokens that end an answer, so that answers are short."""
    model = llama(seed=1, num_hidden_layers=4, tokenizer=tiny_tokenizer(), initializer_range=0.5)
    model.lanes.plain.generation_config.eos_token_id = list(range(0, 64, 4))
    return model


@pytest.fixture(scope="module")
def config(deep: Model, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A task whose references are the model's own clean answers, so that clean accuracy is 1."""
    path = tmp_path_factory.mktemp("task") / "own.jsonl"
    lines = []
    for question in QUESTIONS:
        said = deep.generate(Transcript.from_messages([{"role": "user", "content": question}]), max_new_tokens=64)
        lines.append({"prompt": question, "answer": said.text.strip()})
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return Config(tasks=(str(path),), samples=3, rates=(20.0, 60.0), noises=("layer", "effect"), single=40.0)


@pytest.fixture(scope="module")
def finished(deep: Model, config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_on(deep, study, config, tmp_path_factory.mktemp("runs"))


def test_a_run_holds_every_row_number_and_figure(finished: Run, config: Config):
    table = finished.df()
    assert len(table) == config.samples * (1 + 1 + 7 * 2 * 3 * 2 + 4 * 2 * 3)
    (task,) = finished.metrics["tasks"]
    assert task["clean"]["mean"] == 1.0
    assert task["judged"]
    assert task["control"] == {"rows": 3, "struck": 0, "same": 3, "kl": pytest.approx(0, abs=1e-6)}
    struck = table[table["group"].isin([CUTS, SINGLES])]
    assert (struck["struck"] > 0).all()
    assert (struck["kl"] > 0).all()
    assert_figures(finished, "accuracy_by_band", "kl_by_band", "kl_by_layer")


def test_the_report_page_says_how_it_was_done_and_what_was_found(finished: Run):
    page = write_report(finished.path, finished.report).read_text(encoding="utf-8")
    assert "The control holds." in page
    assert "drawn anew before each token, and undone after it" in page
    assert "slots are drawn once and struck in all layers" in page
    assert "too few for an interval" in page
    for heading in ("Order of the bands", "Single layers", "K against V", "Controls", "Limits", "Reproduce"):
        assert heading in page
    assert page.count("data:image/png") == 3


def test_a_row_strikes_its_band_and_nothing_else(deep: Model):
    """Struck once, what is written is counted once: bands add up, K and V add up, and all noises strike the same
    slots."""
    given = replace(Config(), timing="once", rates=(30.0,), single=30.0)
    task = Retrieve()
    item = task.items(1, 0)[0]
    sample = trials.Sample(task, item, 0, prompt(item, deep.tokenizer))
    table = trials.answer(deep, sample, cases(given, 4), 0, follow=False)
    table = table[table["group"].isin([CUTS, SINGLES])]
    struck = table.set_index(["noise", "parts", "band"])["struck"].unstack("band")
    assert (struck.groupby("parts").nunique() == 1).all(axis=None)
    one = struck.loc["layer"]
    assert (one.loc["k"] + one.loc["v"] == one.loc["kv"]).all()
    for cut in ("quarters", "halves"):
        assert (one[names_of(cut)].sum(axis=1) == one["all"]).all()
    assert (one[[f"layer {layer}" for layer in range(4)]].sum(axis=1) == one["all"]).all()
    slots = len(sample.tokens) - 1
    assert abs(int(one.loc["k", "all"]) - 0.3 * slots * 4 * 2) <= 4 * 2


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, deep: Model, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    resumed, calls = interrupted(lambda: run_on(deep, study, config, tmp_path), monkeypatch, trials, "answer", at=2)
    assert [sample.number for _, sample, *_ in calls] == [0, 1, 1, 2]
    assert json.dumps(resumed.metrics) == json.dumps(finished.metrics)
    assert resumed.report["answer"] == finished.report["answer"]


def test_a_model_with_fewer_layers_than_bands_is_refused(tiny_llama: Model, config: Config, tmp_path: Path):
    refused(lambda: run_on(tiny_llama, study, config, tmp_path), "3 layers cannot be cut into 4 bands")


# --- the preset of the article's table, on a tiny Qwen2


def test_the_preset_of_the_seeds_table_prints_it_beside_the_measured_one(tiny_qwen2: Path, tmp_path: Path):
    preset = presets()["bands-qwen2.5-7b"]
    # Ten items, K and V together, and two of the noises; all else is the preset's.
    changes = {
        "model": str(tiny_qwen2),
        "tasks": [f"gsm8k:{gsm8k_questions(tmp_path, 10)}"],
        "samples": 10,
        "noises": ["layer", "effect"],
        "parts": ["kv"],
    }
    run = study.run(from_mapping(Config, {**preset.settings, **changes}), tmp_path / "runs")
    assert len(run.df()) == 10 * (1 + 1 + 6 * 3 * 2)
    (task,) = run.metrics["tasks"]
    assert task["scorer"] == "strict"
    (table,) = [
        table
        for section in run.report["sections"]
        for table in section["tables"]
        if section["title"] == "Beside the article's table"
    ]
    assert table["columns"][:3] == ["band", "rate (%)", "canarypwn"]
    assert table["columns"][4:] == ["measured: layer", "measured: effect"]
    rows = {(row[0], row[1]): row for row in table["rows"]}
    assert len(rows) == 1 + 6 * 3
    assert rows["clean", "0"][2].startswith("87.0 % (79.0 to 92.2)")
    assert rows["quarter 4", "2"][2].startswith("12.0 %")
    assert rows["quarter 3", "4"][2].startswith("81.0 %")
    measured = [cell for cell in task["cells"] if cell["noise"] == "effect"]
    assert len(measured) == 18
    for cell in measured:
        shown = rows[cell["band"], f"{cell['rate']:g}"][5]
        assert shown.startswith(f"{100 * cell['accuracy']['mean']:.1f} %")
    page = write_report(run.path, run.report).read_text(encoding="utf-8")
    assert "KV Cache is More Robust Than You Think" in page
    assert "Faults are not ranked on gsm8k" in page
    assert any("table is of Qwen2.5-7B-Instruct" in warning for warning in run.report["warnings"])


def test_the_whole_split_preset_differs_from_the_seeds_own_in_its_number_of_items():
    small, full = (dict(presets()[f"bands-qwen2.5-7b{end}"].settings) for end in ("", "-full"))
    assert (small.pop("samples"), full.pop("samples")) == (100, 1319)
    assert small == full


# --- tables made by hand

MADE_UP = Config(samples=16, rates=(1.0, 2.0), noises=("layer", "channel"), single=5.0)
LAYERS = 8
Value = Callable[[dict[str, Any], int], float]


def louder(labels: dict[str, Any]) -> float:
    """What the last quarter and the third have of KL beside the others, in noise at the layer's scale."""
    return {"quarter 4": 3.0, "quarter 3": 0.5}.get(labels["band"], 1.0) if labels["noise"] == "layer" else 1.0


def made_up(
    config: Config = MADE_UP,
    kl: Value = lambda labels, item: louder(labels),
    right: Value = lambda labels, item: 1.0,
    clean: Callable[[int], float] = lambda item: 1.0,
    task: str = "retrieve",
) -> pd.DataFrame:
    """A run's table in which these are the measures of each case and item."""
    rows: list[dict[str, Any]] = []
    for item in range(config.samples):
        known = {"task": task, "sample": item, "item": f"item-{item}", "slots": 100 + item, "broken": "", "struck": 8}
        rows.append(known | {"case": -1, "right": bool(clean(item)), "same": True, "kl": 0.0, "struck": 0})
        for number, case in enumerate(cases(config, LAYERS)):
            labels = dict(case.labels)
            is_control = labels["group"] == CONTROL
            told = {
                "right": bool(clean(item) if is_control else right(labels, item)),
                "same": is_control,
                "kl": 0.0 if is_control else float(kl(labels, item)),
                "struck": 0 if is_control else 8,
            }
            rows.append(known | {"case": number} | labels | told)
    return pd.DataFrame(rows)


def analysed(table: pd.DataFrame, config: Config = MADE_UP) -> dict[str, Any]:
    metrics = analyse(table, config, [Retrieve()])
    json.dumps(metrics, allow_nan=False)
    return metrics


def only(entries: list[dict[str, Any]], **labels: Any) -> dict[str, Any]:
    (found,) = [entry for entry in entries if labels.items() <= entry.items()]
    return found


def test_accuracies_losses_and_kl_are_those_of_the_table():
    table = made_up(
        kl=lambda labels, item: 1.0 + item,
        right=lambda labels, item: float(item < 4 if labels["band"] == "quarter 4" else item < 15),
        clean=lambda item: float(item < 14),
    )
    metrics = analysed(table)
    (task,) = metrics["tasks"]
    assert metrics["layers"] == LAYERS
    assert metrics["bands"]["quarter 4"] == [6, 7]
    assert estimate_of(task["clean"]).ends == pytest.approx(wilson(14, 16).ends)
    cell = only(task["cells"], band="quarter 4", noise="layer", parts="kv", rate=2.0)
    assert estimate_of(cell["accuracy"]).ends == pytest.approx(wilson(4, 16).ends)
    assert estimate_of(cell["same"]).ends == pytest.approx(wilson(0, 16).ends)
    assert cell["lost"]["mean"] == pytest.approx(10 / 16)
    assert 0.3 < cell["lost"]["low"] < 10 / 16 < cell["lost"]["high"] < 1
    assert cell["kl"]["mean"] == pytest.approx(8.5)
    spread = np.arange(16).std(ddof=1) / 16**0.5
    assert cell["kl"]["high"] - cell["kl"]["low"] == pytest.approx(2 * 2.1314 * spread, rel=1e-3)


def test_the_seeds_order_is_found_under_the_noise_that_has_it_and_not_under_the_other():
    def kl(labels: dict[str, Any], item: int) -> float:
        # Items differ by far more than bands do: only paired differences can tell the bands apart.
        return 100 * item + louder(labels)

    (task,) = analysed(made_up(kl=kl))["tasks"]
    found = only(task["orders"], cut="quarters", noise="layer", parts="kv", rate=None, measure="kl")
    assert [each["band"] for each in found["bands"]][0::3] == ["quarter 4", "quarter 3"]
    assert (found["last_most"], found["buffer_least"]) == ("yes", "yes")
    first = only(found["pairs"], more="quarter 4", less="quarter 3")
    assert estimate_of(first["difference"]).ends == pytest.approx((2.5, 2.5))
    other = only(task["orders"], cut="quarters", noise="channel", parts="kv", rate=None, measure="kl")
    assert (other["last_most"], other["buffer_least"]) == ("open", "open")
    said = said_of(task)
    assert (
        "last quarter bears noise worst holds under noise at the layer's scale (significantly beyond each other" in said
    )
    assert "is not decided under noise with each head's channel covariance" in said
    assert "quarter 4 > quarter 1" in said


def test_the_opposite_of_the_seeds_order_is_said_to_fail():
    def kl(labels: dict[str, Any], item: int) -> float:
        return {"quarter 3": 3.0, "quarter 4": 0.5}.get(labels["band"], 1.0)

    (task,) = analysed(made_up(kl=kl))["tasks"]
    said = said_of(task)
    assert "bears noise worst fails under all 2 noises" in said
    assert "bears it best, fails under all 2 noises" in said
    assert "holds" not in said


def test_accuracy_ranks_bands_by_what_they_lose():
    (task,) = analysed(made_up(right=lambda labels, item: float(labels["band"] != "quarter 4" or item < 2)))["tasks"]
    found = only(task["orders"], cut="quarters", noise="layer", parts="v", rate=1.0, measure="lost")
    assert found["bands"][0]["band"] == "quarter 4"
    assert found["bands"][0]["mean"]["mean"] == pytest.approx(14 / 16)
    assert found["last_most"] == "yes"
    assert found["buffer_least"] == "open"
    halves = only(task["orders"], cut="halves", noise="layer", parts="v", rate=1.0, measure="lost")
    assert not told(halves["pairs"][0])


@pytest.mark.parametrize(
    ("pairs", "side", "expected"),
    [
        ([("a", "b", 0.1), ("a", "c", 0.1), ("b", "c", -0.1)], "more", "yes"),
        ([("a", "b", 0.1), ("a", "c", -0.1), ("b", "c", 0.1)], "more", "open"),
        ([("b", "a", 0.1), ("a", "c", 0.1), ("b", "c", 0.1)], "more", "no"),
        ([("b", "a", 0.0), ("a", "c", 0.1), ("b", "c", 0.1)], "more", "open"),
        ([("b", "a", 0.1), ("c", "a", 0.1), ("b", "c", 0.1)], "less", "yes"),
        ([("a", "b", 0.1), ("c", "a", 0.1), ("c", "b", 0.1)], "less", "no"),
        ([("b", "c", 0.1)], "more", "open"),
    ],
)
def test_a_band_is_the_extreme_one_only_if_told_apart_from_all_others(
    pairs: list[tuple[str, str, float]], side: str, expected: str
):
    entries = [
        {"more": more, "less": less, "difference": {"mean": 0.2, "low": low, "high": 1.0}} for more, less, low in pairs
    ]
    assert verdict(entries, side, "a") == expected


def test_the_last_quarters_lead_is_a_ratio_and_another_scale_changes_it():
    (task,) = analysed(made_up(kl=lambda labels, item: (1 + item) * louder(labels)))["tasks"]
    layer = only(task["last_against_others"], noise="layer", parts="k")
    assert estimate_of(layer["ratio"]).ends == pytest.approx([3 / (2.5 / 3)] * 2)
    assert layer["change"] is None
    channel = only(task["last_against_others"], noise="channel", parts="k")
    assert estimate_of(channel["ratio"]).ends == pytest.approx([1.0] * 2)
    assert estimate_of(channel["change"]).ends == pytest.approx([(2.5 / 3) / 3] * 2)
    assert "differs significantly from that at the layer's scale under noise with each head's" in said_of(task)
    (even,) = analysed(made_up(kl=lambda labels, item: 1.0 + item))["tasks"]
    assert "That it depends on the noise's scale was not detected." in said_of(even)


def test_single_layers_ranked_alike_correlate_fully_and_the_other_way_round_negatively():
    def kl(labels: dict[str, Any], item: int) -> float:
        if labels["group"] != SINGLES:
            return 1.0
        turned = labels["parts"] == "v" and labels["noise"] == "channel"
        return 1.0 + item + (-labels["first"] if turned else labels["first"] ** 2) / 100

    (task,) = analysed(made_up(kl=kl))["tasks"]
    rho = {each["parts"]: each["rho"]["mean"] for each in task["agreement"]}
    assert rho == pytest.approx({"kv": 1.0, "k": 1.0, "v": -1.0})
    assert only(task["self_agreement"], noise="channel", parts="v")["rho"] == pytest.approx(1.0)


def test_layers_that_only_luck_ranks_do_not_agree_with_themselves():
    rng = np.random.default_rng(5)
    (task,) = analysed(made_up(kl=lambda labels, item: float(rng.random())))["tasks"]
    assert abs(only(task["self_agreement"], noise="layer", parts="kv")["rho"]) < 0.6
    assert all(each["rho"]["high"] - each["rho"]["low"] > 0.5 for each in task["agreement"])


def test_rank_correlation_is_spearmans_with_ties_sharing_their_rank():
    ours = spearman(np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 3.0]]), np.array([[2.0, 1.0, 4.0, 3.0]] * 2))
    # By hand: 1 − 6·Σd²/(n(n²−1)) = 1 − 24/60; with a tie, Pearson's of the ranks (1.5, 1.5, 3, 4) and (2, 1, 4, 3).
    assert ours == pytest.approx([0.6, 3.5 / (4.5 * 5) ** 0.5])
    assert np.isnan(spearman(np.ones((1, 4)), np.arange(4.0)[None])).all()


def test_what_noise_in_k_costs_more_than_in_v_is_paired():
    cost = {"kv": 9.0, "k": 5.0, "v": 2.0}
    (task,) = analysed(
        made_up(
            kl=lambda labels, item: 50 * item + cost[labels["parts"]],
            right=lambda labels, item: float(labels["parts"] == "v"),
        )
    )["tasks"]
    for band, rate in (("half 1", None), ("all", 2.0), ("layer 3", 5.0)):
        more = only(task["keys_against_values"], band=band, noise="channel", rate=rate)["more"]
        assert estimate_of(more["kl"]).ends == pytest.approx((3.0, 3.0))
        assert (more["lost"]["mean"], more["lost"]["high"]) == pytest.approx((1.0, 1.0))
        assert estimate_of(more["lost"]).above()
    assert "K in 7 and V in 0 of 7 bands under noise at the layer's scale" in said_of(task)


def test_faults_are_not_ranked_by_accuracy_on_a_task_that_the_model_cannot_do():
    metrics = analysed(made_up(right=lambda labels, item: float(item < 2), clean=lambda item: float(item < 3)))
    (task,) = metrics["tasks"]
    assert not task["judged"]
    assert {order["measure"] for order in task["orders"]} == {"kl"}
    assert all(set(each["more"]) == {"kl"} for each in task["keys_against_values"])
    assert only(task["cells"], band="all", noise="layer", parts="k", rate=1.0)["accuracy"]["mean"] == 2 / 16
    assert "By accuracy nothing is ranked" in said_of(task)
    assert "Faults are not ranked on retrieve" in warnings(metrics, MADE_UP)[0]


def test_broken_rows_count_as_wrong_are_left_out_of_kl_and_are_named():
    table = made_up()
    mine = (table["band"] == "quarter 4") & (table["noise"] == "layer") & (table["parts"] == "k") & (table["rate"] == 2)
    broken = mine & (table["sample"] < 3)
    table.loc[broken, "broken"] = "K of layer 6, KV head 0, slot 11"
    table.loc[broken, "kl"] = 1e9
    metrics = analysed(table)
    (task,) = metrics["tasks"]
    cell = only(task["cells"], band="quarter 4", noise="layer", parts="k", rate=2.0)
    assert cell["broken"] == 3
    assert estimate_of(cell["accuracy"]).ends == pytest.approx(wilson(13, 16).ends)
    assert cell["kl"]["mean"] == pytest.approx(3.0)
    (warning,) = warnings(metrics, MADE_UP)
    assert f"In 3 of {len(table)} rows" in warning
    assert "in the first of them K of layer 6, KV head 0, slot 11" in warning


def test_kl_of_a_case_that_broke_in_most_items_is_not_told():
    table = made_up()
    broken = (table["band"] == "quarter 4") & (table["rate"] == 2) & (table["sample"] < 9)
    table.loc[broken, "broken"] = "V of layer 7, KV head 1, slot 2"
    (task,) = analysed(table)["tasks"]
    assert only(task["cells"], band="quarter 4", noise="layer", parts="k", rate=2.0)["kl"] is None
    measured = {(each["rate"], each["measure"]) for each in task["orders"] if each["cut"] == "quarters"}
    assert measured == {(1.0, "kl"), (1.0, "lost"), (2.0, "lost"), (None, "lost")}
    assert only(task["last_against_others"], noise="layer", parts="k")["ratio"] is None
    assert "The last quarter's mean KL" not in said_of(task)


def test_the_map_of_layers_holds_each_noise_in_each_part_and_nothing_where_most_rows_broke(
    finished: Run, config: Config
):
    def kl(labels: dict[str, Any], item: int) -> float:
        return (
            labels["first"]
            + {"layer": 0.0, "channel": 0.5}[labels["noise"]]
            + {"kv": 20, "k": 30, "v": 40}[labels["parts"]]
        )

    table = made_up(kl=kl)
    broken = (table["group"] == SINGLES) & (table["noise"] == "layer") & (table["parts"] == "v") & (table["first"] == 6)
    table.loc[broken, "broken"] = "V of layer 6, KV head 1, slot 2"
    (task,) = analysed(table)["tasks"]
    found = layer_map(task)
    assert found.rows == [str(layer) for layer in range(LAYERS)]
    column = {name: [row[place] for row in found.values] for place, name in enumerate(found.columns)}
    assert len(column) == 6
    assert column["channel covariance, in K alone"] == pytest.approx([30.5 + layer for layer in range(LAYERS)])
    assert column["the layer's scale, in V alone"] == [40, 41, 42, 43, 44, 45, None, 47]
    (section,) = [each for each in finished.report["sections"] if each["title"].startswith("Single layers")]
    assert [len(each["rows"]) for each in section["maps"]] == [4]


def test_a_control_that_does_not_hold_and_few_items_are_warned_of():
    few = replace(MADE_UP, samples=4)
    table = made_up(few)
    assert len(warnings(analysed(table, few), few)) == 1
    table.loc[(table["group"] == CONTROL) & (table["sample"] == 2), "same"] = False
    first, second = warnings(analysed(table, few), few)
    assert "4 items of retrieve are too few for an interval" in first
    assert "DOES NOT HOLD" in second


def test_the_seeds_table_stands_beside_the_cells_that_were_measured():
    config = replace(MADE_UP, tasks=("gsm8k",), reported="canarypwn-bands-7b", bands=("quarters",))
    table = made_up(config, right=lambda labels, item: float(item < 8), task="gsm8k")
    metrics = analyse(table, config, [GSM8K()])
    (task,) = metrics["tasks"]
    row = only(task["published"]["rows"], band="quarter 4", rate=2.0)
    assert estimate_of(row["theirs"]).ends == pytest.approx(wilson(12, 100).ends)
    assert row["difference"]["mean"] == pytest.approx(0.5 - 0.12)
    assert row["difference"]["low"] > 0
    assert only(task["published"]["rows"], band="half 1", rate=1.0)["difference"] is None
    assert only(task["published"]["rows"], band="quarter 1", rate=4.0)["difference"] is None
    section = seed_section(metrics, task, config, 0, "")
    # .5 of 16 items against the article's of 100: distinguishable from .12, not from .43 to .79 of which .79 twice is
    # near.
    apart = sum(
        each["difference"]["low"] > 0 or each["difference"]["high"] < 0
        for each in task["published"]["rows"]
        if each["difference"]
    )
    assert f"{apart} of 8 accuracies differ" in section.paragraphs[0]
    shown = {(line[0], line[1]): line for line in section.tables[0].rows}
    assert shown["half 1", "1"][3:] == ["not measured"] * 3
    assert shown["quarter 4", "2"][4].startswith("50.0 %")


def test_the_difference_of_two_shares_is_newcombes():
    # Newcombe 1998, Statistics in Medicine 17:873, table II, example (a), method 10: 56/70 − 48/80.
    found = newcombe(wilson(56, 70), wilson(48, 80))
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert newcombe(Estimate(0.5, 0.4, 0.6), Estimate(0.5, 0.4, 0.6)).mean == 0
    few = newcombe(wilson(4, 4), wilson(48, 80))
    assert not few.has_interval
    assert few.ends == pytest.approx((1 - wilson(48, 80).high, 1 - wilson(48, 80).low))


def test_every_cut_and_noise_has_a_name_in_reports():
    every = [name for cut in BANDS for name in names_of(cut)]
    assert len(set(every)) == 7
    assert set(BAND_STYLES) == set(every)
    assert set(NOISE_NAMES) == set(NOISE_STYLES) == set(NOISES)
