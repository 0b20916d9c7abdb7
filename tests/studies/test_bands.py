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

from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults import Distractor, Draws, Gaussian, Scope, Zeros
from kvprobe.faults.gaussian import factors_of
from kvprobe.inference.model import Model
from kvprobe.stats import Estimate, binomial
from kvprobe.studies.bands import Config
from kvprobe.studies.bands.collect import CONTROL, CUTS, SINGLES, cases
from kvprobe.studies.bands.conclude import FACTORIAL, conclude
from kvprobe.studies.bands.study import STUDY
from kvprobe.text.transcript import Transcript
from tests.experiments.made_up import answer_of, page_of
from tests.inference.made_up import made_up_answers
from tests.models import any_model, llama, tiny_tokenizer
from tests.random_caches import random_tokens
from tests.studies.runs import whole_run
from tests.tasks.made_up import gsm8k_questions

SLOTS = 100
PRUNING = Config(
    samples=16,
    noises=("random", "random-sinks", "window"),
    rates=(50.0, 98.0),
    parts=("kv",),
    timing="once",
    single=0.0,
)

SCAFFOLD = Config(
    samples=16, noises=("zeros", "scaffold"), bands=("halves", "sixths"), rates=(100.0,), parts=("kv",), single=0.0
)


def test_every_band_meets_every_noise_part_and_rate_once_and_a_control_comes_first():
    every = cases(Config(rates=(4.0, 1.0)), 30, SLOTS)
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
    assert not [case for case in cases(Config(single=0.0), 30, SLOTS) if case.labels["group"] == SINGLES]
    for timing, when in {"once": (0, False), "fresh": ("every", True), "piling": ("every", False)}.items():
        faults = [case.trial.fault for case in cases(Config(timing=timing), 4, SLOTS)]
        assert {(fault.at, fault.transient) for fault in faults} == {when}


def test_pruning_hides_as_many_slots_in_every_way_and_spares_those_that_it_says(tiny_llama: Model):
    ledger = tiny_llama.prefill(random_tokens(0, {"T1": SLOTS})).ledger
    hidden: dict[tuple[Any, ...], set[int]] = {}
    for case in cases(PRUNING, LAYERS, SLOTS):
        scope, labels = case.trial.hidden, case.labels
        assert scope is not None
        mask = scope.struck(scope.order(ledger, (LAYERS, 1), Draws(), 0), (LAYERS, 1))[:, 0]
        layers = set(mask.any(1).nonzero()[:, 0].tolist())
        assert layers == (set(range(int(labels["first"]), int(labels["last"]) + 1)) if labels["rate"] else set())
        slots = hidden.setdefault((labels["noise"], labels["rate"]), set(mask.any(0).nonzero()[:, 0].tolist()))
        assert mask.sum(1).tolist() == [len(slots) if layer in layers else 0 for layer in range(LAYERS)]
    assert hidden["random", 0.0] == set()
    for noise in PRUNING.noises:
        assert hidden[noise, 50.0] < hidden[noise, 98.0]
        assert len(hidden[noise, 50.0]) == 50
    assert hidden["window", 50.0] == set(range(4, 54))
    assert hidden["window", 98.0] == hidden["random-sinks", 98.0] == set(range(4, 100))
    assert len(hidden["random", 98.0]) == 98


def test_zeros_and_a_scaffold_take_the_prompts_slots_alone():
    kinds = {"zeros": Zeros(), "scaffold": Distractor("scaffold")}
    for case in cases(SCAFFOLD, LAYERS, SLOTS):
        fault = case.trial.fault
        assert fault.scope.among == "prompt"
        assert replace(fault, scope=Scope(), at=0, transient=False) == kinds[str(case.labels["noise"])]


def test_a_page_says_what_is_left_without_the_prompt_in_the_last_layers(tmp_path: Path):
    def right(labels: dict[str, Any], item: int) -> float:
        return float(labels["band"] == "sixth 6" or (labels["noise"] == "scaffold" and item < 4))

    def kl(labels: dict[str, Any], item: int) -> float:
        return 3.0 + 0.1 * item if labels["noise"] == "zeros" else 1.0

    conclusion = numbers(SCAFFOLD, kl=kl, right=right)
    run = page_of(STUDY, SCAFFOLD, conclusion, tmp_path)
    said = answer(STUDY, run)
    assert re.search(
        r"With nothing but zeros in 100 % of the prompt's slots: 0\.0 % \(.*\) in their last half, 100\.0 %", said
    )
    assert re.search(r"template around filler\) in 100 % of the prompt's slots: 25\.0 %", said)
    assert said.startswith("With a scaffold in place of the prompt in the last sixth of the layers 100.0 %")
    assert "+2.8 (" in run.read("report.html")


def test_a_page_on_pruning_says_where_it_costs_most(tmp_path: Path):
    def right(labels: dict[str, Any], item: int) -> float:
        return float(item < 4 if labels["band"] == "quarter 3" else True)

    conclusion = numbers(PRUNING, kl=lambda labels, _: {"quarter 3": 3.0}.get(labels["band"], 1.0), right=right)
    run = page_of(STUDY, PRUNING, conclusion, tmp_path)
    said = answer(STUDY, run)
    assert "That it harms the third quarter least: no with every way." in said
    assert "With 98 % of the third quarter's slots gone, lost are +75.0 points" in said
    page = run.read("report.html")
    assert "as if they were evicted there" in page
    assert "with Gaussian noise in" not in page


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
    damage = {"rates": (20.0, 60.0), "noises": ("layer", "effect"), "single": 40.0}
    return Config(tasks=(str(path),), samples=3, together=2, **damage)


@pytest.fixture(scope="module")
def finished(deep: Model, config: Config, root: Path) -> Run:
    return whole_run(STUDY, config, deep, root, [True])


def test_a_run_holds_every_row_number_and_figure(finished: Run, config: Config):
    table, conclusion = finished.df(), Conclusion.of(finished.metrics)
    findings, (task,) = conclusion.findings, config.tasks
    assert len(table) == config.samples * (1 + len(cases(config, 4, SLOTS)))
    assert findings.at("sound", task=task).mean == 1.0
    assert (table.loc[table["group"].isin([CUTS, SINGLES]), ["struck", "kl"]] > 0).all(axis=None)
    assert "slots are drawn once and struck in all layers" in (finished.path / "report.html").read_text()


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

    def became(labels: dict[str, Any], item: int) -> dict[str, Any]:
        if labels["group"] == CONTROL:
            return {"right": bool(clean(item)), "struck": 0}
        return {"right": bool(right(labels, item)), "same": False, "kl": float(kl(labels, item))}

    every = cases(config, LAYERS, SLOTS)
    return made_up_answers(task, config.samples, lambda _: every, lambda item: bool(clean(item)), became)


def numbers(config: Config = MADE_UP, **columns: Any) -> Conclusion:
    return conclude(made_up(config, **columns), config, any_model())


def example() -> tuple[Config, Conclusion]:
    config = replace(MADE_UP, noises=FACTORIAL, parts=("k", "v"))
    return config, numbers(
        config,
        kl=lambda labels, item: louder(labels) * (2.0 if labels["parts"] == "k" else 1.0),
        right=lambda labels, item: float(item < 6 if "4" in str(labels["band"]) else item < 12),
    )


def noise(rng: np.random.Generator) -> Conclusion:
    """No band, noise or part costs more than another."""
    size = rng.gamma(2.0, size=MADE_UP.samples)
    able = rng.uniform(0.3, 1.0, MADE_UP.samples)
    return numbers(
        kl=lambda labels, item: float(rng.gamma(2.0) * size[item]),
        right=lambda labels, item: float(rng.random() < able[item]),
        clean=lambda item: float(rng.random() < able[item]),
    )


def test_each_factor_of_noise_multiplies_kl_by_what_it_does(tmp_path: Path):
    times = {"mean": 0.5, "spread": 0.2, "covariance": 1.0}

    def kl(labels: dict[str, Any], item: int) -> float:
        own = factors_of(labels["noise"])
        joint = 0.1 if {"mean", "spread"} <= set(own) else 1.0
        joint *= 1.001 ** ((item - 7.5) * len(own))  # items differ, and their geometric mean does not
        return (1 + item) * joint * float(np.prod([times[factor] for factor in own]))

    config = replace(MADE_UP, noises=FACTORIAL, bands=("all",), single=0.0)
    conclusion = numbers(config, kl=kl)
    findings = conclusion.findings
    said = "own mean lowers KL, its spread lowers KL, and its correlation does not detectably change KL."
    assert said in answer_of(STUDY, config, conclusion, tmp_path)
    for factor, alone in times.items():
        both = 0.1**0.5 if factor != "covariance" else 1.0
        assert findings.at("alone", task="retrieve", parts="k", factor=factor).mean == pytest.approx(alone)
        assert findings.at("factor", task="retrieve", parts="k", factor=factor).mean == pytest.approx(alone * both)
    assert not numbers(replace(config, noises=FACTORIAL[:-1]), kl=kl).findings.where("factor")


def at(conclusion: Conclusion, name: str, **keys: Any) -> Estimate:
    return conclusion.findings.at(name, task="retrieve", **keys)


def order(conclusion: Conclusion, **labels: Any) -> dict[str, Any]:
    (ranked,) = [candidate for candidate in conclusion.facts["orders"] if labels.items() <= candidate.items()]
    return ranked


def test_accuracies_losses_and_kl_are_those_of_the_table_and_bands_are_ranked_by_what_they_lose():
    conclusion = numbers(
        kl=lambda labels, item: 1.0 + item,
        right=lambda labels, item: float(item < 4 if labels["band"] == "quarter 4" else item < 15),
        clean=lambda item: float(item < 14),
    )
    quarters = {f"quarter {place}": [2 * place - 2, 2 * place - 1] for place in range(1, 5)}
    assert conclusion.facts["bands"] == {**quarters, "half 1": [0, 3], "half 2": [4, 7], "all": [0, 7]}
    cell = {"band": "quarter 4", "noise": "layer", "parts": "kv", "rate": 2.0}
    for name, right in {"accuracy": 4, "same": 0}.items():
        assert at(conclusion, name, **cell).ends == pytest.approx(binomial(right, 16).ends)
    assert at(conclusion, "sound").mean == 14 / 16
    assert at(conclusion, "lost", **cell).mean == 10 / 16
    assert at(conclusion, "kl", **cell).mean == pytest.approx(8.5)
    lost = {"noise": "layer", "parts": "v", "rate": 1.0, "measure": "lost"}
    ranked = order(conclusion, cut="quarters", **lost)
    assert (ranked["bands"][0], ranked["last"], ranked["buffer"]) == ("quarter 4", "yes", "open")
    assert order(conclusion, cut="halves", **lost)["apart"] == [False]


def test_the_articles_order_is_found_under_the_noise_that_has_it_and_not_under_the_other(tmp_path: Path):
    # Items differ by far more than bands do: only paired differences can distinguish the bands.
    conclusion = numbers(kl=lambda labels, item: 100 * item + louder(labels))
    by_kl = {"cut": "quarters", "parts": "kv", "rate": None, "measure": "kl"}
    layer, channel = (order(conclusion, noise=noise, **by_kl) for noise in MADE_UP.noises)
    assert layer["bands"][0::3] == ["quarter 4", "quarter 3"]
    assert layer["apart"] == [True, False, True]
    assert [(ranked["last"], ranked["buffer"]) for ranked in (layer, channel)] == [("yes", "yes"), ("open", "open")]
    pair = {"noise": "layer", "parts": "kv", "first": "quarter 3", "second": "quarter 4"}
    assert at(conclusion, "pair_kl", cut="quarters", **pair).ends == pytest.approx((-2.5, -2.5))
    said = answer(STUDY, page_of(STUDY, MADE_UP, conclusion, tmp_path))
    assert said.count("yes with the layer's scale; not decided with channel covariance.") == 2
    opposite = {"quarter 3": 3.0, "quarter 4": 0.5}
    ranked = order(numbers(kl=lambda labels, item: opposite.get(labels["band"], 1.0)), noise="channel", **by_kl)
    assert (ranked["last"], ranked["buffer"]) == ("no", "no")


def test_intervals_of_pairs_hold_together_over_a_cut_all_noises_and_tasks():
    config = replace(MADE_UP, tasks=("retrieve", "recite"))
    first, second = (
        made_up(config, lambda labels, _: louder(labels) + (labels["parts"] == "k"), task=task) for task in config.tasks
    )
    second = second.assign(sample=second["sample"] + config.samples)
    findings = conclude(pd.concat([first, second]), config, any_model()).findings
    for name in ("pair_kl", "pair_kl_at", "pair_lost", "pair_lost_at"):
        counts = {finding.keys["cut"]: finding.comparisons for finding in findings.where(name)}
        assert counts == {"quarters": 6 * 2 * 2, "halves": 1 * 2 * 2}
    for name, places in {"keys_more": 7, "layer_keys_more": LAYERS}.items():
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
    for name, place, several in (("keys_", {"band": "half 1"}, 7 * 2), ("layer_keys_", {"layer": 3}, LAYERS * 2)):
        assert at(conclusion, f"{name}kl", noise="channel", **place).ends == pytest.approx((3.0, 3.0))
        assert at(conclusion, f"{name}lost", noise="channel", **place).mean == 1
        assert at(conclusion, f"{name}more", noise="channel", **place).ends == binomial(16, 16, several).ends
        for measure in ("more", "lost"):
            claim = STUDY.claim(conclusion.findings, name + measure, task="retrieve", noise="channel", **place)
            assert claim == "K costs more"
    assert at(conclusion, "keys_kl_at", noise="layer", band="all", rate=2.0).ends == pytest.approx((3.0, 3.0))


def test_in_how_many_items_k_costs_more_does_not_depend_on_a_few_with_a_large_kl(tmp_path: Path):
    def kl(labels: dict[str, Any], item: int) -> float:
        if labels["noise"] == "layer" or labels["parts"] != "k":
            return 1.0 + item  # as much in K as in V: no item counts
        return 1e6 if item == 0 else 0.5 + item

    conclusion = numbers(kl=kl)
    assert at(conclusion, "keys_kl", noise="channel", band="all").mean > 1e4
    assert at(conclusion, "keys_more", noise="channel", band="all").mean == 1 / 16
    assert conclusion.findings.get("keys_more", task="retrieve", noise="layer", band="all") is None
    run = page_of(STUDY, MADE_UP, conclusion, tmp_path)
    said, page = answer(STUDY, run), run.read("report.html")
    assert "costs more KL than in V alone in 0 of 7 bands with channel covariance (less in 7)." in said
    assert re.search(r"half 1</td><td>6\.25 % \([\d.]+ to [\d.]+\)</td>.*<td>V costs more</td>", page)


def test_bands_are_not_ranked_by_accuracy_on_a_task_that_the_model_cannot_do(tmp_path: Path):
    conclusion = numbers(right=lambda labels, item: float(item < 2), clean=lambda item: float(item < 3))
    assert {ranked["measure"] for ranked in conclusion.facts["orders"]} == {"kl"}
    assert not {"keys_lost", "layer_keys_lost", "pair_lost"} & set(conclusion.findings.names)
    assert at(conclusion, "accuracy", band="all", noise="layer", parts="k", rate=1.0).mean == 2 / 16
    assert "Faults are not ranked on retrieve" in conclusion.warnings[0]
    assert page_of(STUDY, MADE_UP, conclusion, tmp_path, drawn=True).read("report.html").count("data:image/png") == 2


def test_broken_rows_count_as_wrong_are_left_out_of_kl_at_all_rates_and_are_named():
    table = made_up()
    broken = "band == 'quarter 4' and noise == 'layer' and parts == 'k' and rate == 2 and sample < 3"
    table.loc[table.eval(broken), ["broken", "kl"]] = "K of layer 6, KV head 0, slot 11", 1e9
    conclusion = conclude(table, MADE_UP, any_model())
    cell = {"band": "quarter 4", "noise": "layer", "parts": "k", "rate": 2.0}
    assert at(conclusion, "broken", **cell).mean == 3
    assert at(conclusion, "accuracy", **cell).ends == pytest.approx(binomial(13, 16).ends)
    assert at(conclusion, "kl", **cell).mean == pytest.approx(3.0)
    assert at(conclusion, "kl", **{**cell, "rate": 1.0}).clusters == 16
    assert at(conclusion, "kl_all", band="quarter 4", noise="layer", parts="k").clusters == 13
    (warning,) = conclusion.warnings
    assert re.search(rf"3 of {len(table)} rows .* The first: K of layer 6, KV head 0, slot 11", warning)
    # Broken in most items, a case has no KL at all.
    table.loc[table.eval("band == 'quarter 1' and rate == 2 and sample < 9"), "broken"] = "V of layer 7"
    conclusion = conclude(table, MADE_UP, any_model())
    assert conclusion.findings.get("kl", task="retrieve", **{**cell, "band": "quarter 1"}) is None
    orders = [ranked for ranked in conclusion.facts["orders"] if ranked["cut"] == "quarters"]
    measured = {(ranked["rate"], ranked["measure"]) for ranked in orders}
    assert measured == {(1.0, "kl"), (1.0, "lost"), (2.0, "lost"), (None, "lost")}
    assert "lead" not in conclusion.findings


def test_a_control_in_which_something_was_struck_fails():
    # What else fails it: tests/studies/test_robustness.py.
    table = made_up()
    assert [control.holds for control in conclude(table, MADE_UP, any_model()).controls] == [True]
    table.loc[table.index[(table["group"] == CONTROL) & (table["sample"] == 2)], "struck"] = 1
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
    assert conclusion.findings.at("published", **cell).ends == pytest.approx(binomial(12, 100).ends)
    difference = conclusion.findings.at("less_published", **cell)
    assert 0 < difference.low < difference.mean == pytest.approx(0.5 - 0.12)
    run = page_of(STUDY, config, conclusion, tmp_path, drawn=True)
    rows = [re.findall("<td>(.*?)</td>", row) for row in run.read("report.html").split("<tr>")]
    shown = {(row[0], row[1]): row[2:] for row in rows if len(row) == 6}
    assert shown["clean", "0 %"][0] == "87.0 % (78.8 to 92.9)"
    assert shown["half 1", "1 %"][1:] == ["–"] * 3
    assert [cell[:6] for cell in shown["quarter 4", "2 %"]] == ["12.0 %", "+38.0 ", "50.0 %", "50.0 %"]
    assert ", published" in run.read("figures/accuracy_by_band.svg")
    assert "table is of Qwen2.5-7B-Instruct" in conclusion.warnings[0]
