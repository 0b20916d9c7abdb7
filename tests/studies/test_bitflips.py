"""The bit-flip study on a tiny model, and what hand-made rows decide."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.bitflips.study as study
from kvprobe.experiments import trials
from kvprobe.experiments.runs import Run
from kvprobe.experiments.trials import Sample
from kvprobe.faults import Draws, FaultContext
from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.faults.strike import corrupt
from kvprobe.inference.model import Model
from kvprobe.models.geometry import Geometry
from kvprobe.report.page import write_report
from kvprobe.stats import DIFFERENCE, estimate, wilson
from kvprobe.studies.bitflips.analyse import analyse, difference, mean_of, of_field, tolerated
from kvprobe.studies.bitflips.collect import ANY, FIELDS, cases, places
from kvprobe.studies.bitflips.config import Config
from kvprobe.studies.bitflips.figures import bit_maps, draw_all
from kvprobe.studies.bitflips.narrative import answer, answer_bits, answer_rate, answer_silence, narrate, warnings
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt
from kvprobe.text.tokens import Tokens
from kvprobe.wording import estimate_of
from tests.studies.runs import assert_figures, interrupted, run_on

PROMPTS = ("the user is at the sea", "a hat is a hat", "it is 12 at the hut")
RATES = (1e-3, 1e-1)


@pytest.fixture(scope="module")
def config(tiny_llama: Model, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Prompts that the tiny model answers rightly, since what it answers is called right."""
    path = tmp_path_factory.mktemp("own") / "own.jsonl"

    def write(answers: list[str]) -> None:
        lines = [{"prompt": said, "answer": told} for said, told in zip(PROMPTS, answers, strict=True)]
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    write(["unknown"] * len(PROMPTS))
    task = find_task(str(path))
    said = [
        trials.answer(tiny_llama, Sample(task, item, 0, prompt(item, tiny_llama.tokenizer)), [], 0)
        for item in task.items(len(PROMPTS), 0)
    ]
    write([table["text"][0].strip() for table in said])
    return Config(tasks=(str(path),), samples=len(PROMPTS), dtypes=("bf16", "fp16"), flips=1, error_rates=RATES)


@pytest.fixture(scope="module")
def finished(config: Config, tiny_llama: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_on(tiny_llama, study, config, tmp_path_factory.mktemp("runs"))


def a_sample(number: int) -> Sample:
    task = find_task("retrieve")
    return Sample(task, task.items(1, 0)[0], number, Tokens.of([1, 2], "prompt", 0))


SHAPE = Geometry(n_layers=6, n_heads=2, n_kv_heads=2, d_head=8, d_model=16, windows=(None,) * 6, max_position=None)


def test_a_flip_strikes_one_number_and_the_same_at_every_bit_of_every_dtype(tiny_llama: Model):
    config = Config(flips=2)
    sample = a_sample(3)
    tokens = Tokens.of(list(range(2, 14)), "prompt", 0)
    cache = tiny_llama.prefill(tokens)
    found: dict[int, set[tuple[Any, ...]]] = {0: set(), 1: set()}
    single = [case for case in cases(config, sample, tiny_llama.geometry) if case.labels["group"] == "single"]
    assert len(single) == 2 * (16 + 16 + 32)
    for case in single:
        draws = [Draws(0, sample.number, case.trial.repeat)]
        struck, damage = corrupt(cache, case.trial.fault, [FaultContext(cache)], draws)
        places_struck = [
            (part, layer, *index)
            for part, mine, theirs in (("k", cache.keys, struck.keys), ("v", cache.values, struck.values))
            for layer, (before, after) in enumerate(zip(mine, theirs, strict=True))
            for index in (before != after).nonzero().tolist()
        ]
        assert len(places_struck) == 1
        assert damage.count.tolist() == [1]
        assert places_struck[0][:2] == (case.labels["part"], case.labels["layer"])
        assert places_struck[0][3] == case.labels["head"]
        found[case.trial.repeat].add(places_struck[0])
        if case.labels["dtype"] == "fp32":
            again, _ = corrupt(struck, case.trial.fault, [FaultContext(struck)], draws)
            for before, after in zip((*cache.keys, *cache.values), (*again.keys, *again.values), strict=True):
                torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert [len(each) for each in found.values()] == [1, 1]
    assert found[0] != found[1]


def test_places_depend_on_seed_and_sample_and_more_flips_begin_with_fewer():
    few, many = (places(Config(flips=flips), 5, SHAPE) for flips in (3, 40))
    assert many[:3] == few
    assert places(Config(flips=40, seed=1), 5, SHAPE) != many
    assert places(Config(flips=40), 6, SHAPE) != many
    assert {each.layer for each in many} == set(range(6))
    assert {(each.head, each.part) for each in many} == {(0, "k"), (0, "v"), (1, "k"), (1, "v")}


def test_a_run_holds_every_flip_its_numbers_and_a_report(finished: Run, config: Config, tiny_llama: Model):
    table = finished.df()
    assert len(table) == config.samples * (1 + 16 + 16 + len(FIELDS) * 2 + 2)
    assert table[table["group"] == "single"]["struck"].eq(1).all()
    (task,) = finished.metrics["tasks"]
    assert task["clean"]["mean"] == 1
    control = task["control"]
    assert (control["rows"], control["struck"], control["changed"]) == (6, 0, 0)
    assert control["flips_struck"] == [1, 1]
    assert control["kl"] < 1e-6
    lowest = {each["rate"]: each for each in of_field(task, "mantissa")}
    assert lowest[0.1]["struck"] > lowest[0.001]["struck"]
    prompts = [prompt(item, tiny_llama.tokenizer) for item in find_task(config.tasks[0]).items(config.samples, 0)]
    numbers = np.mean([len(tokens) - 1 for tokens in prompts]) * 3 * 2 * 2 * 8
    assert task["numbers"] == pytest.approx(numbers)
    assert lowest[0.1]["expected"] == pytest.approx(0.1 * numbers)
    assert_figures(finished, "shares_by_bit_1", "kl_by_bit_1", "damage_by_rate_1")
    (by_bit,) = [each for each in finished.report["sections"] if each["title"].startswith("By bit")]
    assert [each["caption"].split(",")[0] for each in by_bit["maps"]] == [
        each.caption.split(",")[0] for each in bit_maps(task)
    ]
    page = write_report(finished.path, finished.report).read_text(encoding="utf-8")
    assert "Flipped bits in K and V" in page
    assert "The control holds" in page
    assert "written once, after the prompt" in page


def test_the_highest_exponent_bit_moves_the_tiny_model_more_than_the_lowest_mantissa_bit(finished: Run):
    for dtype in finished.metrics["tasks"][0]["dtypes"]:
        kl = {each["bit"]: each["kl"] for each in dtype["bits"]}
        assert kl[14]["mean"] > 100 * kl[0]["mean"]


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, config: Config, tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    resumed, calls = interrupted(
        lambda: run_on(tiny_llama, study, config, tmp_path), monkeypatch, trials, "answer", at=2
    )
    assert [sample.number for _, sample, *_ in calls] == [0, 1, 1, 2]
    assert resumed.metrics == finished.metrics
    assert resumed.report == finished.report


Became = Callable[[dict[str, Any], int], dict[str, Any]]


def made_up(became: Became, config: Config, right: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
    """The numbers of a task whose rows became this, by labels and sample."""
    harmless = {"right": True, "same": True, "kl": 0.0, "broken": "", "struck": 1, "text": " 531."}
    known = {"task": "retrieve", "slots": 101, "answer": "531"}
    rows = []
    for number in range(config.samples):
        own = known | {"sample": number, "item": f"item-{number}"}
        clean = right(number)
        rows.append(own | harmless | {"case": -1, "right": clean, "struck": 0})
        for case, each in enumerate(cases(config, a_sample(number), SHAPE)):
            labels = dict(each.labels)
            struck = {"struck": 0} if labels["group"] == "control" else {}
            told = became(labels, number) if labels["group"] != "control" else {}
            rows.append(own | harmless | {"case": case, "right": clean} | labels | struck | told)
    return analyse(pd.DataFrame(rows), config, SHAPE)


MADE_UP = Config(samples=20, dtypes=("bf16",), flips=4, error_rates=(1e-5, 1e-4, 1e-3))
WRONG = {"right": False, "same": False, "kl": 2.0, "text": " 500."}
REWORDED = {"same": False, "kl": 0.5, "text": " 531, yes"}
BROKEN = {"right": False, "same": False, "kl": np.nan, "broken": "K of layer 2, KV head 1, slot 7", "text": ""}


def is_bit(labels: dict[str, Any], bit: int, flips: int = 4) -> bool:
    return labels["group"] == "single" and labels["bit"] == bit and labels["flip"] < flips


def test_flips_fall_into_three_classes_over_the_items_that_were_right():
    def became(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        if is_bit(labels, 14, 1):
            return BROKEN
        if is_bit(labels, 14, 3):
            return WRONG
        return REWORDED if is_bit(labels, 13, 2) and sample >= 10 else {}

    metrics = made_up(became, MADE_UP, right=lambda sample: sample >= 8)
    (task,) = metrics["tasks"]
    assert (task["items"], task["right"], task["too_hard"]) == (20, 12, None)
    assert task["clean"] == wilson(12, 20).record()
    (dtype,) = task["dtypes"]
    bits = {each["bit"]: each for each in dtype["bits"]}
    assert bits[14]["right"] == {
        "nothing": wilson(3, 12).record(),
        "words": wilson(0, 12).record(),
        "breaks": wilson(9, 12).record(),
        "nonfinite": wilson(3, 12).record(),
    }
    assert bits[14]["same"] == wilson(5, 20).record()
    assert bits[14]["different"] == wilson(10, 20).record()
    assert (bits[14]["flips"], bits[14]["nonfinite_flips"]) == (80, 20)
    assert bits[14]["kl"]["mean"] == pytest.approx(2 * 2 / 3), "flips that were not finite have no KL"
    assert bits[13]["right"]["words"] == wilson(5, 12).record()
    assert bits[13]["right"]["breaks"] == wilson(0, 12).record()
    assert bits[13]["kl"]["mean"] == pytest.approx(0.5 / 4)
    assert bits[0]["right"]["nothing"] == wilson(12, 12).record()
    assert (dtype["altered"], dtype["nonfinite"], dtype["breaking"]) == ([13, 14], [14], [14])
    breaks = dtype["fields"]["exponent"]["right"]["breaks"]
    assert breaks == pytest.approx(wilson(12 * 0.75 / 8, 12).record())
    assert task["broken"]["single"]["broken"] == 20
    assert task["broken"]["single"]["first"]["broken"] == "K of layer 2, KV head 1, slot 7"
    assert [(each["bit"], each["right"], each["item"]) for each in task["examples"]] == [(14, False, "item-8")]
    said = answer(task)
    assert "The worst is bit 14 (exponent), which breaks 75.0 %" in said
    assert "At 2 of the 16 bits of bf16 some flip altered an answer" in said
    assert "20 of 1280 single flips, of bit 14 of bf16" in answer_silence(task)


def test_the_maps_of_bits_hold_what_breaks_and_what_is_reworded_and_nothing_beyond_a_dtypes_bits():
    def became(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        return WRONG if is_bit(labels, 14, 3) else REWORDED if is_bit(labels, 13, 1) else {}

    (task,) = made_up(became, replace(MADE_UP, dtypes=("bf16", "fp32")))["tasks"]
    breaks, words = bit_maps(task)
    assert breaks.rows == words.rows == [str(bit) for bit in range(32)]
    assert breaks.columns == ["bf16", "fp32"]
    assert (breaks.values[14], breaks.values[13]) == ([0.75, 0.75], [0, 0])
    assert (words.values[14], words.values[13]) == ([0, 0], [0.25, 0.25])
    assert breaks.values[16] == [None, 0]
    (hard,) = made_up(became, MADE_UP, right=lambda sample: sample < 2)["tasks"]
    (changed,) = bit_maps(hard)
    assert [changed.values[bit] for bit in (12, 13, 14)] == [[0], [0.25], [0.75]]


@pytest.mark.parametrize(
    ("breaking", "found"),
    [("exponent", "the exponent is what matters"), ("mantissa", "the mantissa matters more"), ("", "No difference")],
)
def test_the_answer_says_which_field_matters_or_that_none_was_found(breaking: str, found: str):
    def became(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        return WRONG if labels["group"] == "single" and labels["field"] == breaking else {}

    (task,) = made_up(became, MADE_UP)["tasks"]
    assert found in answer_bits(task)
    gap = {"exponent": 1.0, "mantissa": -1.0, "": 0.0}[breaking]
    held = task["dtypes"][0]["contrasts"]["exponent - mantissa"]
    assert held["breaks"] == held["changed"]
    assert (held["breaks"]["mean"], estimate_of(held["breaks"]).differs()) == (gap, gap != 0)
    assert held["kl"]["mean"] == pytest.approx(2 * gap)


def test_keys_are_held_against_values_and_late_layers_against_early_ones_at_exponent_bits():
    def keys(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        return WRONG if labels["field"] == "exponent" and labels["part"] == "k" else {}

    def early(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        return WRONG if labels["field"] == "exponent" and labels["layer"] in (0, 1) else {}

    of_keys, of_early = (made_up(each, MADE_UP)["tasks"][0]["dtypes"][0]["contrasts"] for each in (keys, early))
    assert (of_keys["k - v"]["breaks"]["mean"], of_keys["k - v"]["breaks"]["high"]) == (1, 1)
    assert (of_early["late - early"]["breaks"]["mean"], of_early["late - early"]["breaks"]["low"]) == (-1, -1)
    assert of_early["k - v"]["breaks"]["low"] < 0 < of_early["k - v"]["breaks"]["high"]


def test_means_and_differences_count_the_items_that_have_rows():
    values = np.random.default_rng(1).normal(size=30)
    items = np.repeat(np.arange(10), 3)
    rows = pd.DataFrame({"cluster": items, "kl": values})
    assert mean_of(rows, "kl") == pytest.approx(estimate(values, items).record())
    missing = mean_of(rows[rows["cluster"] > 1], "kl")
    assert missing is not None
    assert (missing["mean"], missing["clusters"]) == pytest.approx((values[6:].mean(), 8))
    one = rows[rows["cluster"] == 2]
    assert mean_of(one, "kl") is None, "one item has no interval"
    assert difference(rows, one, "kl") is None
    paired = difference(rows, rows.assign(kl=values - items), "kl")
    assert paired == pytest.approx(estimate(items.astype(float), items).record())
    alike = difference(rows.assign(kl=1.0), rows.assign(kl=1.0), "kl", DIFFERENCE)
    assert alike is not None
    assert alike["low"] < 0 < alike["high"]


def test_the_highest_bearable_rate_is_below_the_first_that_costs_significantly():
    def became(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        if labels["group"] != "rate" or labels["field"] == "mantissa":
            return {}
        lost = {1e-5: 1, 1e-4: 15, 1e-3: 20}[labels["rate"]]
        return (BROKEN if labels["rate"] == 1e-3 else WRONG) if sample < lost else {}

    (task,) = made_up(became, MADE_UP)["tasks"]
    rates = of_field(task, ANY)
    assert [each["accuracy"] for each in rates] == [wilson(right, 20).record() for right in (19, 5, 0)]
    assert not estimate_of(rates[0]["from_clean"]).below()
    assert rates[2]["nonfinite_rows"] == 20
    assert rates[2]["kl"] is None
    assert [each["expected"] for each in rates] == pytest.approx([0.192, 1.92, 19.2])
    assert task["numbers"] == 100 * 6 * 2 * 2 * 8
    assert tolerated(task, ANY) == rates[0]
    assert tolerated(task, "mantissa") == of_field(task, "mantissa")[2]
    assert "up to a rate of 1e-5 (about 0.19 flips); at 1e-4" not in answer_rate(task)
    assert "up to a rate of 1e-5 (about 0.19 flips); at 0.0001 (about 1.9 flips) it is 25.0 %" in answer_rate(task)


def test_a_rate_that_costs_at_once_and_one_that_never_does_are_told():
    def at_once(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        return WRONG if labels["group"] == "rate" else {}

    (harmed,) = made_up(at_once, MADE_UP)["tasks"]
    (unharmed,) = made_up(lambda *_: {}, MADE_UP)["tasks"]
    assert tolerated(harmed, ANY) is None
    assert "below clean (100.0 % (83.9 to 100.0)) at the lowest rate measured, 1e-5" in answer_rate(harmed)
    assert answer_rate(unharmed).endswith("the highest measured.")


def test_on_a_task_that_is_too_hard_only_the_same_and_the_finite_are_told(
    tmp_path: Path, finished: Run, tiny_llama: Model
):
    def became(labels: dict[str, Any], sample: int) -> dict[str, Any]:
        return BROKEN if is_bit(labels, 14, 2) else WRONG if is_bit(labels, 13) else {}

    metrics = made_up(became, MADE_UP, right=lambda sample: sample < 2)
    (task,) = metrics["tasks"]
    (dtype,) = task["dtypes"]
    assert dtype["breaking"] is None
    assert all(each["right"] is None for each in dtype["bits"])
    assert all(held["breaks"] is None for held in dtype["contrasts"].values())
    assert dtype["bits"][14]["nonfinite"] == wilson(10, 20).record()
    said = answer(task)
    assert "Faults are not ranked on retrieve" in said
    assert "breaks" not in said
    assert "of an exponent bit of bf16 changes" in said
    report = json.dumps(narrate(metrics, MADE_UP, tiny_llama, finished.environment).to_dict())
    assert "another" in report
    assert "other words" not in report
    assert any("Faults are not ranked" in each for each in warnings(metrics, torch.float32))
    draw_all(metrics, "made up", tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "shares_by_bit_1.png",
        "kl_by_bit_1.png",
        "damage_by_rate_1.png",
    }


def test_without_following_there_is_no_kl_and_no_figure_of_it(tmp_path: Path, finished: Run, tiny_llama: Model):
    config = replace(MADE_UP, follow=False)
    metrics = made_up(lambda *_: {"kl": np.nan}, config)
    (task,) = metrics["tasks"]
    assert task["dtypes"][0]["all"]["kl"] is None
    draw_all(metrics, "made up", tmp_path)
    assert not (tmp_path / "kl_by_bit_1.png").exists()
    report = json.dumps(narrate(metrics, config, tiny_llama, finished.environment).to_dict())
    assert "it was not measured here" in report
    assert "kl_by_bit" not in report
    assert "No difference between fields was detected" in answer(task)


def test_few_items_and_a_coarse_model_are_warned_of():
    metrics = made_up(lambda *_: {}, MADE_UP)
    assert warnings(metrics, torch.float32) == []
    assert "rounded away again" in warnings(metrics, torch.bfloat16)[0]
    few = made_up(lambda *_: {}, Config(samples=4, dtypes=("bf16",), flips=1, error_rates=(1e-3,)))
    assert "4 items" in warnings(few, torch.float32)[0]
    seldom = made_up(lambda *_: {}, MADE_UP, right=lambda sample: sample < 11)
    assert "only 11 items are answered rightly" in warnings(seldom, torch.float32)[0]


def test_every_bit_of_every_dtype_is_struck():
    found = list(cases(Config(flips=1), a_sample(0), SHAPE))
    struck = {(case.labels["dtype"], case.labels["bit"]) for case in found if case.labels["group"] == "single"}
    assert struck == {(name, bit) for name, layout in LAYOUTS.items() for bit in range(layout.bits)}
    rates = [case for case in found if case.labels["group"] == "rate"]
    assert {(case.labels["field"], case.labels["rate"]) for case in rates} == {
        (field, rate) for field in FIELDS for rate in Config().error_rates
    }
    assert {case.labels["dtype"] for case in rates} == {"bf16"}
