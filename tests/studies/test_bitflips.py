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

from kvprobe.experiments import trials
from kvprobe.experiments.estimands import Pooled, measure
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.experiments.trials import Sample
from kvprobe.faults import Draws, FaultContext
from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.faults.strike import corrupt
from kvprobe.inference.model import Model
from kvprobe.models.geometry import Geometry
from kvprobe.stats import DIFFERENCE, Estimate, estimate, wilson
from kvprobe.studies import bitflips
from kvprobe.studies.bitflips.collect import FIELDS, cases, places
from kvprobe.studies.bitflips.conclude import concluded
from kvprobe.studies.bitflips.config import Config
from kvprobe.studies.bitflips.study import STUDY
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import prompt
from kvprobe.text.tokens import Tokens
from tests.studies.runs import assert_figures, interrupted, page_of

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
    return bitflips.run(config, tmp_path_factory.mktemp("runs"), model=tiny_llama)


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


def test_a_run_holds_every_flip_its_numbers_and_its_figures(finished: Run, config: Config, tiny_llama: Model):
    table, found = finished.df(), Conclusion.of(finished.metrics)
    assert len(table) == config.samples * (1 + 16 + 16 + len(FIELDS) * 2 + 2)
    (task,) = found.findings.values("sound", "task")
    assert at(found, "sound", task=task).mean == 1
    assert [control.holds for control in found.controls] == [True, True]
    high, low = (at(found, "struck", task=task, field="mantissa", rate=rate).mean for rate in (0.1, 0.001))
    assert high > low
    prompts = [prompt(item, tiny_llama.tokenizer) for item in find_task(config.tasks[0]).items(config.samples, 0)]
    numbers = np.mean([len(tokens) - 1 for tokens in prompts]) * 3 * 2 * 2 * 8
    assert at(found, "numbers", task=task).mean == pytest.approx(numbers)
    assert at(found, "expected", task=task, rate=0.1).mean == pytest.approx(0.1 * numbers)
    for dtype in config.dtypes:
        top, lowest = (at(found, "bit_kl", task=task, dtype=dtype, bit=bit).mean for bit in (14, 0))
        assert top > 100 * lowest
    assert_figures(finished, "shares_by_bit", "kl_by_bit", "damage_by_rate", "changed_by_rate")


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, config: Config, tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    resumed, calls = interrupted(
        lambda: bitflips.run(config, tmp_path, model=tiny_llama), monkeypatch, trials, "answer", at=2
    )
    assert [sample.number for _, sample, *_ in calls] == [0, 1, 1, 2]
    assert resumed.metrics == finished.metrics


Labels = dict[str, Any]
Became = Callable[[Labels, int], dict[str, Any]]


def made_up(
    became: Became, config: Config, right: Callable[[int], bool] = lambda _: True, dtype: str = "float32"
) -> Conclusion:
    """What is concluded of a task whose rows became this, by labels and sample."""
    return concluded(rows_of(became, config, right), config, SHAPE, dtype)


def rows_of(became: Became, config: Config, right: Callable[[int], bool] = lambda _: True) -> pd.DataFrame:
    harmless = {"right": True, "same": True, "kl": 0.0, "broken": "", "struck": 1, "text": " 531."}
    known = {"task": "retrieve", "slots": 101, "answer": "531"}
    rows = []
    for number in range(config.samples):
        own = known | {"sample": number, "item": f"item-{number}"} | harmless | {"right": right(number)}
        rows.append(own | {"case": -1, "struck": 0})
        for case, each in enumerate(cases(config, a_sample(number), SHAPE)):
            labels = dict(each.labels)
            outcome = {"struck": 0} if labels["group"] == "control" else became(labels, number)
            rows.append(own | {"case": case} | labels | outcome)
    return pd.DataFrame(rows)


def at(found: Conclusion, name: str, **keys: Any) -> Estimate:
    return found.findings.at(name, **{"task": "retrieve", **keys})


def page(found: Conclusion, config: Config, folder: Path) -> tuple[str, str]:
    """The answer of a page, and all of it."""
    run = page_of(STUDY, config, found, folder)
    return " ".join(answer(STUDY, run).split()), run.read("report.html")


MADE_UP = Config(samples=20, dtypes=("bf16",), flips=4, error_rates=(1e-5, 1e-4, 1e-3))
WRONG = {"right": False, "same": False, "kl": 2.0, "text": " 500."}
REWORDED = {"same": False, "kl": 0.5, "text": " 531, yes"}
BROKEN = {"right": False, "same": False, "kl": np.nan, "broken": "K of layer 2, KV head 1, slot 7", "text": ""}


def is_bit(labels: Labels, bit: int, flips: int = 4) -> bool:
    return labels["group"] == "single" and labels["bit"] == bit and labels["flip"] < flips


def test_flips_fall_into_three_classes_over_the_items_that_were_right(tmp_path: Path):
    def became(labels: Labels, sample: int) -> dict[str, Any]:
        if is_bit(labels, 14, 1):
            return BROKEN
        if is_bit(labels, 14, 3):
            return WRONG
        return REWORDED if is_bit(labels, 13, 2) and sample >= 10 else {}

    found = made_up(became, MADE_UP, right=lambda sample: sample >= 8)
    assert at(found, "sound") == wilson(12, 20)
    shares = {
        14: {"nothing": (3, 12), "words": (0, 12), "breaks": (9, 12), "loud": (3, 12)}
        | {"same": (5, 20), "different": (10, 20), "nonfinite": (5, 20), "changed": (15, 20)},
        13: {"words": (5, 12), "breaks": (0, 12), "changed": (5, 20)},
        0: {"nothing": (12, 12), "changed": (0, 20)},
    }
    for bit, expected in shares.items():
        for became_so, share in expected.items():
            assert at(found, "bit_share", dtype="bf16", bit=bit, became=became_so) == wilson(*share)
    assert at(found, "bit_kl", dtype="bf16", bit=14).mean == pytest.approx(2 * 2 / 3), "what broke has no KL"
    assert at(found, "bit_kl", dtype="bf16", bit=13).mean == pytest.approx(0.5 / 4)
    assert [at(found, f"bit_{name}", dtype="bf16", bit=14).mean for name in ("flips", "nonfinite")] == [80, 20]
    breaks = at(found, "field_share", dtype="bf16", field="exponent", became="breaks")
    assert breaks.ends == pytest.approx(wilson(12 * 0.75 / 8, 12).ends)
    fact = found.facts["tasks"]["retrieve"]
    assert fact["broken"]["single"]["broken"] == 20
    assert fact["broken"]["single"]["first"]["broken"] == "K of layer 2, KV head 1, slot 7"
    assert [(each["bit"], each["right"], each["item"]) for each in fact["examples"]] == [(14, False, "item-8")]
    said, whole = page(found, MADE_UP, tmp_path)
    assert "Most answers broke after flips of bit 14: 75.0 % (46.8 to 91.1)." in said
    assert "<td>bf16</td><td>16</td><td>2</td><td>14</td>" in whole


@pytest.mark.parametrize(
    ("breaking", "gap", "claimed"),
    [("exponent", 1, "more often than"), ("mantissa", -1, "less often than"), ("", 0, "not detectably more often")],
)
def test_the_answer_says_which_field_matters_or_that_none_was_detected(
    breaking: str, gap: int, claimed: str, tmp_path: Path
):
    found = made_up(lambda labels, _: WRONG if is_single(labels, breaking) else {}, MADE_UP)
    pair = {"dtype": "bf16", "first": "exponent", "second": "mantissa"}
    breaks, changed, kl = (at(found, f"contrast_{name}", **pair) for name in ("breaks", "changed", "kl"))
    assert breaks == changed
    assert (breaks.mean, breaks.differs(), kl.mean) == (gap, gap != 0, 2 * gap)
    assert f"flips of exponent bits break answers {claimed}" in page(found, MADE_UP, tmp_path)[0]


def is_single(labels: Labels, field: str) -> bool:
    return labels["group"] == "single" and labels["field"] == field


def test_keys_are_compared_with_values_late_layers_with_early_ones_and_the_top_with_the_rest_at_exponent_bits():
    only: dict[tuple[str, str], Callable[[Labels], bool]] = {
        ("k", "v"): lambda labels: labels["part"] == "k",
        ("late", "early"): lambda labels: labels["layer"] in (4, 5),
        ("top", "rest"): lambda labels: labels["bit"] == 14,
    }
    for pair, chosen in only.items():
        found = made_up(
            lambda labels, _, chosen=chosen: WRONG if is_single(labels, "exponent") and chosen(labels) else {}, MADE_UP
        )
        gaps = {other: at(found, "contrast_breaks", dtype="bf16", first=other[0], second=other[1]) for other in only}
        assert gaps.pop(pair).ends == (1, 1) or pair == ("top", "rest")
        assert not any(gap.differs() for gap in gaps.values())


def test_means_and_differences_of_rows_count_the_clusters_that_have_any():
    values, items = np.random.default_rng(1).normal(size=30), np.repeat(np.arange(10), 3)
    rows = pd.DataFrame({"sample": items, "kind": "one", "kl": values})

    def pooled(*tables: pd.DataFrame, **more: Any) -> Estimate | None:
        """The mean of the first table, less that of the second."""
        table = pd.concat([own.assign(kind=str(number)) for number, own in enumerate(tables)])
        less = {"kind": "1"} if len(tables) > 1 else None
        return measure(table, [Pooled(name="gap", of="kl", where={"kind": "0"}, less=less, **more)]).get("gap")

    def expect(found: Estimate | None, expected: Estimate) -> None:
        assert found is not None
        assert found.record() == pytest.approx(expected.record())

    expect(pooled(rows), estimate(values, items))
    unequal = rows.drop(index=[0, 1, 5]).assign(kl=lambda table: table["kl"].where(table["sample"] != 9))
    known = unequal.dropna()
    expect(pooled(unequal), estimate(known["kl"].to_numpy(), known["sample"].to_numpy()))
    one = rows[rows["sample"] == 2]
    assert pooled(one) is None, "one item has no interval"
    assert pooled(rows, one) is None
    expect(pooled(rows, rows.assign(kl=values - items)), estimate(items.astype(float), items))
    some = pooled(rows, rows[rows["sample"] > 1])
    assert some is not None
    assert (some.mean, some.clusters) == (pytest.approx(values.mean() - values[6:].mean()), 10)
    alike = pooled(rows.assign(kl=1.0), rows.assign(kl=1.0), within=DIFFERENCE)
    assert alike is not None
    assert alike.low < 0 < alike.high


def test_the_highest_tolerated_rate_is_below_the_first_that_costs_significantly(tmp_path: Path):
    def became(labels: Labels, sample: int) -> dict[str, Any]:
        if labels["group"] != "rate" or labels["field"] == "mantissa":
            return {}
        lost = {1e-5: 1, 1e-4: 15, 1e-3: 20}[labels["rate"]]
        return (BROKEN if labels["rate"] == 1e-3 else WRONG) if sample < lost else {}

    found = made_up(became, MADE_UP)
    rates = [{"field": "any", "rate": rate} for rate in MADE_UP.error_rates]
    assert [at(found, "accuracy", **keys) for keys in rates] == [wilson(right, 20) for right in (19, 5, 0)]
    assert not at(found, "from_clean", **rates[0]).below()
    assert at(found, "nonfinite_rows", **rates[2]).mean == 20
    assert found.findings.get("kl", task="retrieve", **rates[2]) is None
    assert [at(found, "expected", rate=rate).mean for rate in MADE_UP.error_rates] == pytest.approx([0.192, 1.92, 19.2])
    assert [at(found, "tolerated", field=field).mean for field in ("any", "mantissa")] == [1e-5, 1e-3]
    assert "not detected up to a rate of 1e-5 (about 0.19 flips)." in page(found, MADE_UP, tmp_path)[0]


def test_a_rate_that_costs_at_once_and_one_that_never_does_are_reported(tmp_path: Path):
    harmed = made_up(lambda labels, _: WRONG if labels["group"] == "rate" else {}, MADE_UP)
    unharmed = made_up(lambda *_: {}, MADE_UP)
    assert at(harmed, "tolerated", field="any").unknown
    assert "already at the lowest rate measured, 1e-5 (about" in page(harmed, MADE_UP, tmp_path / "1")[0]
    assert "up to the highest rate measured 1e-3" in page(unharmed, MADE_UP, tmp_path / "2")[0]


def test_on_a_task_that_is_too_hard_only_the_same_and_the_finite_are_reported(tmp_path: Path):
    def became(labels: Labels, sample: int) -> dict[str, Any]:
        return BROKEN if is_bit(labels, 14, 2) else WRONG if is_bit(labels, 13) else {}

    found = made_up(became, MADE_UP, right=lambda sample: sample < 2)
    assert not found.findings.where("bit_share", became="breaks")
    assert not found.findings.where("contrast_breaks")
    assert "tolerated" not in found.findings
    assert at(found, "bit_share", dtype="bf16", bit=14, became="nonfinite") == wilson(10, 20)
    assert any("Faults are not ranked on retrieve" in warning for warning in found.warnings)
    said, whole = page(found, MADE_UP, tmp_path)
    assert "flips of exponent bits change answers" in said
    assert "break" not in said
    assert "another answer" in whole
    assert "other words" not in whole


def test_without_following_there_is_no_kl_and_no_figure_of_it(tmp_path: Path):
    config = replace(MADE_UP, follow=False)
    found = made_up(lambda *_: {"kl": np.nan}, config)
    assert "bit_kl" not in found.findings
    whole = page(found, config, tmp_path)[1]
    assert not list(tmp_path.rglob("kl_by_bit.png"))
    assert "it was not measured here" in whole
    assert "KL was not measured in this run" in whole


@pytest.mark.parametrize(
    ("group", "column", "value", "place"),
    [
        ("control", "struck", 1, 0),
        ("control", "same", False, 0),
        ("control", "kl", 1e-5, 0),
        ("single", "struck", 2, 1),
    ],
)
def test_a_control_that_fails_is_said_to_fail(group: str, column: str, value: Any, place: int):
    table = rows_of(lambda *_: {}, MADE_UP)
    assert [control.holds for control in concluded(table, MADE_UP, SHAPE).controls] == [True, True]
    table.loc[table.index[table["group"] == group][0], column] = value
    assert [control.holds for control in concluded(table, MADE_UP, SHAPE).controls] == [place != 0, place != 1]


def test_few_items_and_a_coarse_model_are_warned_of():
    assert made_up(lambda *_: {}, MADE_UP).warnings == []
    assert "rounded away again" in made_up(lambda *_: {}, MADE_UP, dtype="bfloat16").warnings[0]
    few = made_up(lambda *_: {}, Config(samples=4, dtypes=("bf16",), flips=1, error_rates=(1e-3,)))
    assert "4 items" in few.warnings[0]
    assert "tolerated" not in few.findings
    seldom = made_up(lambda *_: {}, MADE_UP, right=lambda sample: sample < 11)
    assert "only 11 items are answered rightly" in seldom.warnings[0]


def test_every_bit_of_every_dtype_is_struck():
    found = list(cases(Config(flips=1), a_sample(0), SHAPE))
    struck = {(case.labels["dtype"], case.labels["bit"]) for case in found if case.labels["group"] == "single"}
    assert struck == {(name, bit) for name, layout in LAYOUTS.items() for bit in range(layout.bits)}
    rates = [case for case in found if case.labels["group"] == "rate"]
    assert {(case.labels["field"], case.labels["rate"]) for case in rates} == {
        (field, rate) for field in FIELDS for rate in Config().error_rates
    }
    assert {case.labels["dtype"] for case in rates} == {"bf16"}
