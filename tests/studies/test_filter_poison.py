"""The filter-poison study: a whole run on a tiny model, tables with known answers, and what is said of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvprobe.studies.filter_poison.collect as collecting
import kvprobe.studies.filter_poison.study as study
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.layers import Component, restored_together
from kvprobe.report.page import write_report
from kvprobe.stats import Estimate
from kvprobe.studies.filter_poison.analyse import FILTER, MATCHED, POISON, analyse, heads_by_half
from kvprobe.studies.filter_poison.collect import NONE, STRUCK, cases_of, fault_of, struck_of
from kvprobe.studies.filter_poison.config import FALSE, Config
from kvprobe.studies.filter_poison.narrative import answer, controls, removed, told_of, warnings
from tests.refusals import refused
from tests.studies.runs import FOUR_FACTS, assert_figures, give, resumed_after

FAMILIES = ("zeros:50", "distractor:50", FALSE)
SMALL = Config(kinds=("code",), prompts=4, families=FAMILIES, suffix=3, top=3, random=4)
N_LAYERS, N_HEADS = 4, 4


@pytest.fixture(autouse=True, scope="module")
def four_facts(deep: Model) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, deep)
        patch.setattr(collecting, "facts", lambda _: FOUR_FACTS)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study.run(SMALL, tmp_path_factory.mktemp("runs"))


# ---- a whole run


def test_every_component_is_restored_in_every_family(finished: Run):
    maps = finished.df("maps")
    assert set(maps["family"]) == {NONE, *SMALL.rates}
    counts = maps[maps["family"] == FALSE].groupby(["prompt", "kind"]).size()
    assert set(counts.xs("head", level="kind")) == {N_LAYERS * N_HEADS}
    assert set(counts.xs("attn", level="kind")) == set(counts.xs("mlp", level="kind")) == {N_LAYERS}
    assert (maps.loc[maps["family"] != NONE, "damage"] > 1e-4).all()


def test_controls_hold_and_would_fail_if_they_did_not(finished: Run):
    assert all(holds for _, holds in controls(finished.metrics))
    for name in ("undamaged", "everything"):
        broken = finished.metrics | {"controls": finished.metrics["controls"] | {name: 0.01}}
        assert [holds for _, holds in controls(broken)].count(False) == 1
        assert any("doubt this run" in text for text in warnings(broken))


def test_sets_are_tested_on_the_half_that_they_were_not_found_on(finished: Run, deep: Model):
    heads, maps = finished.df("heads"), finished.df("maps")
    by_half = heads_by_half(maps, SMALL)
    assert set(heads["sort"]) == {POISON, FILTER, POISON + MATCHED, FILTER + MATCHED}
    one = heads[(heads["family"] == FALSE) & (heads["half"] == 0) & (heads["sort"] == POISON)]
    mean = _joint(deep, one["prompt"].iloc[0], by_half[1][POISON][0])
    assert one["restored"].iloc[0] == pytest.approx(mean, abs=1e-5)
    assert heads.groupby(["prompt", "family", "sort"]).size().max() == SMALL.random


def _joint(model: Model, prompt: str, heads: Any) -> float:
    """KL with these heads restored, by the library's own call."""
    [case] = [case for case in cases_of(SMALL, model) if case.name == prompt]
    clean, damaged = model.prefill(case.true), model.prefill(case.false)
    return float(restored_together(model, clean, damaged, case.suffix, [heads], kept=SMALL.suffix)[1][0])


def test_damage_strikes_what_was_said_and_nothing_else(deep: Model):
    case = cases_of(SMALL, deep)[0]
    clean = deep.prefill(case.true)
    damaged = clean.corrupt(fault_of("zeros", 100.0))
    changed = (damaged.values[0] != clean.values[0]).any(3).any(1)[0]
    assert changed.tolist() == [name in STRUCK for name in case.true.segments]
    assert [one != other for one, other in zip(case.true.ids, case.false.ids, strict=True)].count(True) == 1


def test_the_report_has_every_figure_and_map(finished: Run):
    page = write_report(finished.path, finished.report).read_text(encoding="utf-8")
    assert_figures(finished, "strips", "heads", "states", "tested")
    assert page.count("<img") == 4
    assert page.count('data-component="HeatMap"') == 3
    assert page.count('data-component="AttentionView"') == 2


def test_an_interrupted_run_resumes_with_the_same_numbers(finished: Run, tmp_path: Path):
    again = resumed_after(study, SMALL, tmp_path, "collect_heads", (collecting, "layer_map"))
    assert again.metrics == finished.metrics


# ---- tables with known answers


def table(pi: dict[tuple[int, int], float], prompts: int = 8, noise: float = 0.05) -> pd.DataFrame:
    """Heads with these indices in two families, and what the analysis needs beside them."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for family in (NONE, "zeros", FALSE):
        for prompt in range(prompts):
            labels = {"family": family, "prompt": f"p{prompt}", "half": prompt % 2, "damage": 1.0 * (family != NONE)}

            def row(restored: float, labels: dict[str, Any] = labels, **place: Any) -> dict[str, Any]:
                return {
                    "layer": None,
                    "head": None,
                    "band": None,
                    "noised": 0.1,
                    **place,
                    "restored": restored,
                    **labels,
                }

            for (layer, head), mean in pi.items():
                restored = 1 - mean - noise * rng.standard_normal()
                looks = {
                    "mass": mean + 0.5,
                    "lift": None if family == FALSE and prompt else mean,
                    "contribution": 0.1 * layer,
                }
                rows.append(row(restored, kind="head", layer=layer, head=head, **looks))
            for layer in dict.fromkeys(layer for layer, _ in pi):
                rows += [row(1.0, kind=kind, layer=layer) for kind in ("attn", "mlp")]
            rows.append(row(0.0, kind="band", band="0–1"))
            if family == NONE:
                rows = [each | ({"restored": 0.0, "noised": 0.0} if each["family"] == NONE else {}) for each in rows]
    frame = pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64", "lift": float})
    return frame.assign(pi=1 - frame["restored"])


PI = {(0, 0): 0.4, (0, 1): 0.0, (0, 2): 0.0, (1, 0): -0.4, (1, 1): 0.0, (1, 2): 0.0}
TWO = Config(families=("zeros:50", "false"), top=1, random=6)


def test_heads_are_chosen_by_their_mean_index_and_matched_by_layer():
    for sets in heads_by_half(table(PI), TWO).values():
        assert sets[POISON] == [[Component("head", 0, 0)]]
        assert sets[FILTER] == [[Component("head", 1, 0)]]
        for sort, layer in ((POISON, 0), (FILTER, 1)):
            drawn = [head for group in sets[sort + MATCHED] for head in group]
            assert len(sets[sort + MATCHED]) == TWO.random
            assert {head.layer for head in drawn} == {layer}
            assert {head.head for head in drawn} <= {1, 2}


def outcomes(chosen: dict[str, float]) -> pd.DataFrame:
    rng = np.random.default_rng(2)
    return pd.DataFrame(
        [
            {
                "family": family,
                "prompt": f"p{prompt}",
                "half": prompt % 2,
                "sort": sort + name,
                "draw": draw,
                "damage": scale,
                "restored": scale * (1 - mean - 0.06 * rng.standard_normal()),
            }
            for family, scale in (("zeros", 1.0), (FALSE, 20.0))
            for prompt in range(8)
            for sort, own in chosen.items()
            for name, mean, draws in (("", own, 1), (MATCHED, 0.1, 6))
            for draw in range(draws)
        ]
    )


def states() -> pd.DataFrame:
    columns = ("rho", "rho_after", "gain", "erasure", "erasure_attn", "erasure_mlp", "angle", "drop")
    return pd.DataFrame(
        [
            {"family": family, "prompt": "p0", "layer": layer, **dict.fromkeys(columns, 0.1 * (layer + 1))}
            for family in (NONE, "zeros", FALSE)
            for layer in (0, 1)
        ]
    )


def analysed(chosen: dict[str, float]) -> dict[str, Any]:
    maps = table(PI)
    return analyse(maps, states(), outcomes(chosen), heads_by_half(maps, TWO), TWO)


def test_verdicts_and_shares_are_those_that_were_put_in():
    metrics = analysed({POISON: 0.5, FILTER: -0.3})
    verdicts = {(row["layer"], row["head"]): row["verdict"] for row in metrics["components"] if row["kind"] == "head"}
    assert verdicts[0, 0] == POISON
    assert verdicts[1, 0] == FILTER
    every = {entry["sort"]: entry for entry in metrics["tested"] if entry["family"] == "all"}
    assert every[POISON]["chosen"]["mean"] == pytest.approx(0.5, abs=0.05)
    assert every[FILTER]["difference"]["mean"] == pytest.approx(-0.4, abs=0.05)
    assert metrics["overlap"] == {POISON: 1, FILTER: 1}
    assert metrics["controls"]["everything"] == 0


@pytest.mark.parametrize(
    ("chosen", "poison", "filters"),
    [
        ({POISON: 0.5, FILTER: -0.3}, ": as predicted.", ": as predicted."),
        ({POISON: 0.1, FILTER: 0.1}, "not confirmed.", "not confirmed."),
        ({POISON: -0.3, FILTER: 0.5}, "the opposite of what was predicted.", "the opposite of what was predicted."),
    ],
)
def test_the_answer_says_whether_the_prediction_held(chosen: dict[str, float], poison: str, filters: str):
    metrics = analysed(chosen)
    assert told_of(metrics, POISON).endswith(poison)
    assert told_of(metrics, FILTER).endswith(filters)
    assert told_of(metrics, FILTER) in answer(metrics)


def test_looks_that_order_heads_as_their_index_does_correlate_with_it():
    found = {(entry["family"], entry["look"]): entry for entry in analysed({POISON: 0.5, FILTER: -0.3})["looks"]}
    assert found["zeros", "mass"]["all"]["mean"] > 0.7
    assert found["zeros", "mass"]["within"]["mean"] > 0.7
    assert found[FALSE, "lift"]["all"]["mean"] > 0.7  # most prompts have none
    assert found["zeros", "contribution"]["within"] is None  # the same for all heads of a layer


def test_struck_slots_are_those_that_differ(deep: Model):
    case = cases_of(SMALL, deep)[0]
    clean = deep.prefill(case.true)
    every = [place for place, name in enumerate(case.true.segments) if name in STRUCK]
    assert struck_of(clean, clean.corrupt(fault_of("zeros", 100.0))).tolist() == every
    value = [
        place for place, (one, other) in enumerate(zip(case.true.ids, case.false.ids, strict=True)) if one != other
    ]
    assert struck_of(clean, deep.prefill(case.false)).tolist() == value
    looks = collecting.looks(deep, case, clean, clean.corrupt(fault_of("zeros", 100.0)))
    assert len(looks) == N_LAYERS * N_HEADS
    assert looks["contribution"].max() == pytest.approx(0, abs=1e-6)  # zeros have nothing to be read
    assert looks["mass"].min() > 0


def test_more_damage_is_not_called_less():
    assert removed(Estimate(0.5, 0.4, 0.6)) == "takes away 50.0 % (40.0 to 60.0) of"
    assert removed(Estimate(-0.5, -0.6, -0.4)) == "adds 50.0 % (40.0 to 60.0) to"


# ---- what is refused, and warned of


def test_one_conversation_is_refused_before_anything_is_run(tmp_path: Path):
    one = Config(kinds=("code",), prompts=1, families=FAMILIES)
    refused(lambda: study.run(one, tmp_path), "cannot be split into halves")


def test_a_few_verdicts_that_chance_may_give_are_called_so():
    metrics = analysed({POISON: 0.5, FILTER: -0.3})
    chance = metrics["by_chance"] | {"head": {"mean": 1.0, "high": 3.0}}
    assert any("may be chance" in text for text in warnings(metrics | {"by_chance": chance}))
    assert not any(
        "may be chance" in text
        for text in warnings(metrics | {"by_chance": chance | {"head": {"mean": 0.1, "high": 1.0}}})
    )


def test_a_fault_that_does_not_exist_is_refused(tmp_path: Path):
    refused(lambda: study.run(Config(kinds=("code",), families=("zeroes:30", "false")), tmp_path), "fault")
