"""The band study: which rows are struck where, what its numbers say of tables with known answers, and whole runs on
tiny models."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvprobe.inference.trials as trials
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults import Gaussian
from kvprobe.inference.model import Model
from kvprobe.presets import presets
from kvprobe.stats import Estimate, wilson
from kvprobe.studies import bands
from kvprobe.studies.bands import BANDS, NOISES, Config
from kvprobe.studies.bands.collect import CONTROL, CUTS, SINGLES, cases, cut_bands, names_of
from kvprobe.studies.bands.conclude import conclude
from kvprobe.studies.bands.study import BAND_STYLES, NOISE_STYLES, STUDY
from kvprobe.tasks.retrieve import Retrieve
from kvprobe.tasks.task import prompt
from kvprobe.text.transcript import Transcript
from tests.models import any_model, llama, tiny_tokenizer
from tests.studies.runs import assert_figures, gsm8k_questions, in_steps, page_of


def test_bands_cover_the_layers_once_under_the_names_of_the_reported_table():
    bounds = {name: (layers.start, layers.stop) for name, layers in cut_bands(Config(), 28).items()}
    quarters = {f"quarter {place}": (7 * place - 7, 7 * place) for place in range(1, 5)}
    assert bounds == {**quarters, "half 1": (0, 14), "half 2": (14, 28), "all": (0, 28)}
    assert {name for cut in BANDS for name in names_of(cut)} == set(bounds) == set(BAND_STYLES)
    assert set(NOISE_STYLES) == set(NOISES)


def test_every_band_meets_every_noise_part_and_rate_once_and_a_control_comes_first():
    every = cases(Config(rates=(4.0, 1.0)), 30)
    labels = pd.DataFrame([case.labels for case in every])
    assert labels["group"].value_counts().to_dict() == {SINGLES: 30 * 4 * 3, CUTS: 7 * 4 * 3 * 2, CONTROL: 1}
    assert not labels.duplicated().any()
    assert (labels.iloc[0]["group"], every[0].trial.fault.scope.rate) == (CONTROL, 0)
    for case in every:
        fault, scope = case.trial.fault, case.trial.fault.scope
        assert isinstance(fault, Gaussian)
        assert (fault.matched, scope.parts) == (case.labels["noise"], case.labels["parts"])
        assert 100 * scope.rate == pytest.approx(case.labels["rate"])
        assert scope.layers == tuple(range(int(case.labels["first"]), int(case.labels["last"]) + 1))
    assert not [case for case in cases(Config(single=0.0), 30) if case.labels["group"] == SINGLES]
    for timing, when in {"once": (0, False), "fresh": ("every", True), "piling": ("every", False)}.items():
        faults = [case.trial.fault for case in cases(Config(timing=timing), 4)]
        assert {(fault.at, fault.transient) for fault in faults} == {when}


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
    for question in ("What is the name of the house?", "Who sat there?", "Where did the ship go?"):
        said = deep.generate(Transcript.from_messages([{"role": "user", "content": question}]), max_new_tokens=64)
        lines.append({"prompt": question, "answer": said.text.strip()})
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return Config(tasks=(str(path),), samples=3, rates=(20.0, 60.0), noises=("layer", "effect"), single=40.0)


@pytest.fixture(scope="module")
def finished(deep: Model, config: Config, root: Path) -> Run:
    return in_steps(lambda: bands.run(config, root, model=deep))


def test_a_run_holds_every_row_number_and_figure(finished: Run, config: Config):
    table, conclusion = finished.df(), Conclusion.of(finished.metrics)
    findings, (task,) = conclusion.findings, config.tasks
    in_bands, in_layers = 7 * 2 * 3 * 2, 4 * 2 * 3
    assert len(table) == config.samples * (1 + 1 + in_bands + in_layers)
    assert findings.at("sound", task=task).mean == 1.0
    assert [control.holds for control in conclusion.controls] == [True]
    assert (table.loc[table["group"].isin([CUTS, SINGLES]), ["struck", "kl"]] > 0).all(axis=None)
    counts = [len(findings.where(name)) for name in ("kl", "accuracy", "layer_kl")]
    assert counts == [in_bands, in_bands, in_layers]
    assert_figures(finished, "accuracy_by_band", "kl_by_band", "kl_by_layer")
    assert "slots are drawn once and struck in all layers" in (finished.path / "report.html").read_text()


def test_a_row_strikes_its_band_and_nothing_else(deep: Model):
    """Struck once, what is written is counted once: bands add up, K and V add up, and all noises strike the same
    slots."""
    given = Config(timing="once", rates=(30.0,), single=30.0, noises=("layer", "head"))
    task = Retrieve()
    item = task.items(1, 0)[0]
    sample = trials.Sample(task, item, 0, prompt(item, deep.tokenizer))
    table = pd.DataFrame(trials.answer(deep, sample, cases(given, 4), 0, follow=False))
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


def test_the_whole_split_preset_differs_from_the_articles_own_in_its_number_of_items():
    small, full = (dict(presets()[f"bands-qwen2.5-7b{end}"].settings) for end in ("", "-full"))
    assert {name for name in full if small[name] != full[name]} == {"samples"}


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
            measured = {
                "right": bool(clean(item) if is_control else right(labels, item)),
                "same": is_control,
                "kl": 0.0 if is_control else float(kl(labels, item)),
                "struck": 0 if is_control else 8,
            }
            rows.append(known | {"case": number} | labels | measured)
    return pd.DataFrame(rows)


def numbers(config: Config = MADE_UP, **columns: Any) -> Conclusion:
    return conclude(made_up(config, **columns), config, any_model())


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return MADE_UP, numbers(right=lambda labels, item: float(item < 6 if labels["band"] == "quarter 4" else item < 12))


def noise(rng: np.random.Generator) -> Conclusion:
    """No band, noise or part costs more than another."""
    size = rng.gamma(2.0, size=MADE_UP.samples)
    able = rng.uniform(0.3, 1.0, MADE_UP.samples)
    return numbers(
        kl=lambda labels, item: float(rng.gamma(2.0) * size[item]),
        right=lambda labels, item: float(rng.random() < able[item]),
        clean=lambda item: float(rng.random() < able[item]),
    )


def at(conclusion: Conclusion, name: str, **keys: Any) -> Estimate:
    return conclusion.findings.at(name, task="retrieve", **keys)


def order(conclusion: Conclusion, **labels: Any) -> dict[str, Any]:
    (ranked,) = [candidate for candidate in conclusion.facts["orders"] if labels.items() <= candidate.items()]
    return ranked


def test_accuracies_losses_and_kl_are_those_of_the_table():
    conclusion = numbers(
        kl=lambda labels, item: 1.0 + item,
        right=lambda labels, item: float(item < 4 if labels["band"] == "quarter 4" else item < 15),
        clean=lambda item: float(item < 14),
    )
    assert (conclusion.facts["layers"], conclusion.facts["bands"]["quarter 4"]) == (LAYERS, [6, 7])
    cell = {"band": "quarter 4", "noise": "layer", "parts": "kv", "rate": 2.0}
    for name, right in {"accuracy": 4, "same": 0}.items():
        assert at(conclusion, name, **cell).ends == pytest.approx(wilson(right, 16).ends)
    assert at(conclusion, "sound").mean == 14 / 16
    assert at(conclusion, "lost", **cell).mean == 10 / 16
    assert at(conclusion, "kl", **cell).mean == pytest.approx(8.5)


def test_the_articles_order_is_found_under_the_noise_that_has_it_and_not_under_the_other(tmp_path: Path):
    # Items differ by far more than bands do: only paired differences can distinguish the bands.
    conclusion = numbers(kl=lambda labels, item: 100 * item + louder(labels))
    by_kl = {"cut": "quarters", "parts": "kv", "rate": None, "measure": "kl"}
    layer, channel = (order(conclusion, noise=noise, **by_kl) for noise in MADE_UP.noises)
    assert layer["bands"][0::3] == ["quarter 4", "quarter 3"]
    assert layer["apart"] == [True, False, True]
    assert [(ranked["last"], ranked["buffer"]) for ranked in (layer, channel)] == [("yes", "yes"), ("open", "open")]
    pair = {"cut": "quarters", "noise": "layer", "parts": "kv", "first": "quarter 3", "second": "quarter 4"}
    assert at(conclusion, "pair_kl", **pair).ends == pytest.approx((-2.5, -2.5))
    said = answer(STUDY, page_of(STUDY, MADE_UP, conclusion, tmp_path))
    assert said.count("Yes with the layer's scale; not decided with channel covariance.") == 2
    opposite = {"quarter 3": 3.0, "quarter 4": 0.5}
    conclusion = numbers(kl=lambda labels, item: opposite.get(labels["band"], 1.0))
    orders = [order(conclusion, noise=noise, **by_kl) for noise in MADE_UP.noises]
    assert [(ranked["last"], ranked["buffer"]) for ranked in orders] == [("no", "no")] * 2


def test_intervals_of_pairs_hold_together_over_a_cut_all_noises_and_tasks():
    config = replace(MADE_UP, tasks=("retrieve", "recite"))
    second = made_up(config, task="recite").assign(sample=lambda rows: rows["sample"] + config.samples)
    findings = conclude(pd.concat([made_up(config), second]), config, any_model()).findings
    for name in ("pair_kl", "pair_kl_at", "pair_lost", "pair_lost_at"):
        counts = {finding.keys["cut"]: finding.comparisons for finding in findings.where(name)}
        assert counts == {"quarters": 6 * 2 * 2, "halves": 1 * 2 * 2}
    for name, places in {"keys_kl": 7, "layer_keys_kl": LAYERS}.items():
        assert {finding.comparisons for finding in findings.where(name)} == {places * 2 * 2}


def test_the_last_quarters_lead_is_a_ratio_and_another_scale_changes_it():
    conclusion = numbers(kl=lambda labels, item: (1 + item) * louder(labels))
    layer, channel = ({"noise": noise, "parts": "k"} for noise in MADE_UP.noises)
    assert at(conclusion, "lead", **layer).ends == pytest.approx([3 / (2.5 / 3)] * 2)
    assert conclusion.findings.get("change", task="retrieve", **layer) is None
    assert at(conclusion, "lead", **channel).ends == pytest.approx([1.0] * 2)
    assert at(conclusion, "change", **channel).ends == pytest.approx([(2.5 / 3) / 3] * 2)
    assert STUDY.claim(conclusion.findings, "change", task="retrieve", **channel) == "smaller"
    even = numbers(kl=lambda labels, item: 1.0 + item).findings
    assert STUDY.claim(even, "change", task="retrieve", **channel) == "not detected"


def test_single_layers_ranked_alike_correlate_fully_and_the_other_way_round_negatively():
    def kl(labels: dict[str, Any], item: int) -> float:
        turned = labels["parts"] == "v" and labels["noise"] == "channel"
        return 1.0 + item + (-labels["first"] if turned else labels["first"] ** 2) / 100

    conclusion = numbers(kl=kl)
    for parts, rho in {"kv": 1.0, "k": 1.0, "v": -1.0}.items():
        assert at(conclusion, "agreement", parts=parts, noise="layer", other="channel").mean == pytest.approx(rho)
    assert at(conclusion, "self_agreement", noise="channel", parts="v").mean == pytest.approx(1.0)
    rng = np.random.default_rng(5)
    by_luck = numbers(kl=lambda labels, item: float(rng.random()))
    assert abs(at(by_luck, "self_agreement", noise="layer", parts="kv").mean) < 0.6


def test_what_noise_in_k_costs_more_than_in_v_is_paired():
    cost = {"kv": 9.0, "k": 5.0, "v": 2.0}
    conclusion = numbers(
        kl=lambda labels, item: 50 * item + cost[labels["parts"]],
        right=lambda labels, item: float(labels["parts"] == "v"),
    )
    for name, place in {"keys_": {"band": "half 1"}, "layer_keys_": {"layer": 3}}.items():
        assert at(conclusion, f"{name}kl", noise="channel", **place).ends == pytest.approx((3.0, 3.0))
        assert at(conclusion, f"{name}lost", noise="channel", **place).mean == 1
        assert (
            STUDY.claim(conclusion.findings, f"{name}lost", task="retrieve", noise="channel", **place) == "K costs more"
        )
    assert at(conclusion, "keys_kl_at", noise="layer", band="all", rate=2.0).ends == pytest.approx((3.0, 3.0))


def test_accuracy_ranks_bands_by_what_they_lose_but_not_on_a_task_that_the_model_cannot_do(tmp_path: Path):
    conclusion = numbers(right=lambda labels, item: float(labels["band"] != "quarter 4" or item < 2))
    place = {"noise": "layer", "parts": "v", "rate": 1.0}
    ranked = order(conclusion, cut="quarters", measure="lost", **place)
    assert (ranked["bands"][0], ranked["last"], ranked["buffer"]) == ("quarter 4", "yes", "open")
    assert order(conclusion, cut="halves", measure="lost", **place)["apart"] == [False]
    conclusion = numbers(right=lambda labels, item: float(item < 2), clean=lambda item: float(item < 3))
    assert {ranked["measure"] for ranked in conclusion.facts["orders"]} == {"kl"}
    assert not {"keys_lost", "layer_keys_lost", "pair_lost"} & set(conclusion.findings.names)
    assert "Faults are not ranked on retrieve" in conclusion.warnings[0]
    assert page_of(STUDY, MADE_UP, conclusion, tmp_path, drawn=True).read("report.html").count("data:image/png") == 2


def test_broken_rows_count_as_wrong_are_left_out_of_kl_at_all_rates_and_are_named():
    table = made_up()
    struck = (table["noise"] == "layer") & (table["parts"] == "k") & (table["rate"] == 2)
    few, most = (
        struck & (table["band"] == f"quarter {place}") & (table["sample"] < count) for place, count in ((4, 3), (1, 9))
    )
    table.loc[few | most, ["broken", "kl"]] = "K of layer 6, KV head 0, slot 11", 1e9
    conclusion = conclude(table, MADE_UP, any_model())
    noise = {"noise": "layer", "parts": "k"}
    cell = {**noise, "band": "quarter 4", "rate": 2.0}
    assert at(conclusion, "broken", **cell).mean == 3
    assert at(conclusion, "accuracy", **cell).mean == 13 / 16
    assert at(conclusion, "kl", **cell).mean == pytest.approx(3.0)
    assert at(conclusion, "kl", **{**cell, "rate": 1.0}).clusters == 16
    assert at(conclusion, "kl_all", band="quarter 4", **noise).clusters == 13
    # What broke in most items has no KL, and so no rank by it.
    assert conclusion.findings.get("kl", task="retrieve", **{**cell, "band": "quarter 1"}) is None
    known = {"cut": "quarters", **noise}.items()
    ranked = {(one["rate"], one["measure"]) for one in conclusion.facts["orders"] if known <= one.items()}
    assert ranked == {(1.0, "kl"), (1.0, "lost"), (2.0, "lost"), (None, "lost")}
    assert conclusion.findings.get("lead", task="retrieve", **noise) is None
    (warning,) = conclusion.warnings
    assert re.search(rf"12 of {len(table)} rows .* The first: K of layer 6, KV head 0, slot 11", warning)


@pytest.mark.parametrize(("column", "value"), [("same", False), ("kl", 1e-3), ("struck", 1)])
def test_a_control_that_does_not_hold_fails(column: str, value: object):
    table = made_up()
    assert [control.holds for control in conclude(table, MADE_UP, any_model()).controls] == [True]
    table.loc[table.index[(table["group"] == CONTROL) & (table["sample"] == 2)], column] = value
    assert [control.holds for control in conclude(table, MADE_UP, any_model()).controls] == [False]


def test_without_kl_bands_are_compared_by_accuracy(tmp_path: Path):
    config = replace(MADE_UP, follow=False)
    run = page_of(STUDY, config, numbers(config, kl=lambda *_: np.nan), tmp_path, drawn=True)
    assert "(retrieve, accuracy lost)" in answer(STUDY, run)
    assert run.read("report.html").count("data:image/png") == 1


def test_the_articles_table_stands_beside_the_cells_that_were_measured(tmp_path: Path):
    task = f"gsm8k:{gsm8k_questions(tmp_path, 1)}"
    config = replace(MADE_UP, tasks=(task,), reported="canarypwn-bands-7b", bands=("quarters",))
    conclusion = numbers(config, right=lambda labels, item: float(item < 8), task=task)
    cell = {"task": task, "band": "quarter 4", "rate": 2.0, "noise": "layer", "parts": "kv"}
    assert conclusion.findings.at("published", **cell).ends == pytest.approx(wilson(12, 100).ends)
    difference = conclusion.findings.at("less_published", **cell)
    assert 0 < difference.low < difference.mean == pytest.approx(0.5 - 0.12)
    run = page_of(STUDY, config, conclusion, tmp_path, drawn=True)
    rows = [re.findall("<td>(.*?)</td>", row) for row in run.read("report.html").split("<tr>")]
    shown = {(row[0], row[1]): [cell[:6] for cell in row[2:]] for row in rows if len(row) == 6}
    assert shown["clean", "0 %"][0] == "87.0 %"
    assert shown["half 1", "1 %"][1:] == ["–"] * 3
    assert shown["quarter 4", "2 %"] == ["12.0 %", "+38.0 ", "50.0 %", "50.0 %"]
    assert ", published" in run.read("figures/accuracy_by_band.svg")
    assert "table is of Qwen2.5-7B-Instruct" in conclusion.warnings[0]
