"""The patching study: whole runs on a tiny model, bands and numbers of tables with known answers, and what is said of
them."""

import json
from collections.abc import Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvprobe.studies.patching.collect as collecting
import kvprobe.studies.patching.study as study
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.report.page import write_report
from kvprobe.studies.patching.analyse import analyse, band_of, bands_by_half
from kvprobe.studies.patching.collect import (
    AFTER,
    BANDS,
    BEFORE,
    EVERYTHING,
    HEADS,
    LAYERS,
    RESIDUAL,
    SAME,
    VALUE,
    WHOLE,
    cases_of,
    divided,
    measure_bands,
)
from kvprobe.studies.patching.config import Config
from kvprobe.studies.patching.narrative import answer, controls, findings, warnings
from kvprobe.tasks.facts import Fact, pair
from tests.studies.runs import assert_figures, interrupted, made_up_fact, run_on

N_LAYERS = 4
SMALL = Config(kinds=("code", "name"), facts=3, step=2, check=8)


@pytest.fixture(scope="module")
def tiny_facts(deep: Model) -> tuple[Fact, ...]:
    """Five facts, of two kinds, that this model happens to say right in both runs, and one that it does not."""
    letters = "bcdefghijkmnopqrsu"
    found: list[Fact] = []
    for kind, wanted in (("code", (True, True, True)), ("name", (True, True, False))):
        said = {letter: _likes(deep, made_up_fact(0, kind, (letter, "v"))) for letter in letters}
        id_of = {letter: pair(made_up_fact(0, kind, (letter, "v")), deep.tokenizer).answers[0] for letter in letters}

        def margin(one: str, other: str, said: Any = said, id_of: Any = id_of) -> float:
            """How surely both values are said, each in its own run."""
            here, there = id_of[one], id_of[other]
            return float(min(said[one][here] - said[one][there], said[other][there] - said[other][here]))

        both = sorted(combinations(letters, 2), key=lambda values: -margin(*values))
        right, wrong = iter(both), iter(reversed(both))
        found += [made_up_fact(number, kind, next(right if able else wrong)) for number, able in enumerate(wanted)]
    return tuple(found)


def _likes(model: Model, fact: Fact) -> Any:
    """The logits where the value of the first run should be said."""
    own = pair(fact, model.tokenizer)
    _, logits = model.extend(model.prefill(own.prompts[0]), [own.suffix])
    return logits[0, -1]


def run_tiny(model: Model, chosen: tuple[Fact, ...], root: Path, config: Config = SMALL) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "facts", lambda _: chosen)
        return run_on(model, study, config, root)


@pytest.fixture(scope="module")
def finished(deep: Model, tiny_facts: tuple[Fact, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_tiny(deep, tiny_facts, tmp_path_factory.mktemp("runs"))


# --- whole runs on a tiny model


def test_a_run_counts_what_the_model_cannot_do_and_leaves_it_out_of_the_maps(finished: Run):
    table, metrics = finished.df(), finished.metrics
    assert (metrics["pairs"]["facts"], metrics["pairs"]["able_facts"]) == (6, 5)
    assert metrics["pairs"]["kinds"][1] == {"kind": "name", "runs": 3, "able": 2}
    unable = table[~table["able"]]
    assert set(unable["grid"]) == {WHOLE, EVERYTHING, SAME}
    assert set(table.loc[table["able"], "grid"]) >= {WHOLE, EVERYTHING, SAME, LAYERS, HEADS, RESIDUAL}
    assert metrics["enough"]


def test_controls_hold_on_real_passes(finished: Run):
    assert all(holds for _, holds in controls(finished.metrics))
    table = finished.df()
    early = table[(table["grid"] == WHOLE) & ~table["segment"].isin([VALUE, AFTER, "T2"])]
    assert set(early["segment"]) == {"system", "T1", BEFORE}
    assert early["effect"].abs().max() < 1e-4
    value = table[(table["grid"] == WHOLE) & (table["segment"] == VALUE) & (table["part"] == "KV")]
    assert value["effect"].abs().min() > 1e-3
    everything = table[(table["grid"] == EVERYTHING) & (table["part"] == "KV") & table["able"]]
    np.testing.assert_allclose(everything["normalised"], 1, atol=1e-3)


def test_a_swapped_residual_stream_at_the_first_layer_makes_the_donor(finished: Run):
    table = finished.df()
    first = table[(table["grid"] == RESIDUAL) & (table["layer"] == 0)]
    assert len(first) == 5
    np.testing.assert_allclose(first["normalised"], 1, atol=1e-3)


def test_the_report_has_every_map_view_and_figure(finished: Run):
    page = write_report(finished.path, finished.report).read_text(encoding="utf-8")
    for heading in (
        "What was found",
        "Layer by segment",
        "Layer by KV head",
        "Reader and total",
        "One fact",
        "Controls",
        "Limits",
    ):
        assert heading in page
    assert page.count('data-component="HeatMap"') == 3 + 2 + 2
    assert page.count('data-component="ColoredTokensMulti"') == 1
    assert_figures(
        finished, "whole_by_segment", "layer_by_segment", "layer_by_head", "reader_and_total", "layer_by_slot"
    )
    assert "DOES NOT HOLD" not in page
    assert "too few for an interval" in page


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, deep: Model, tiny_facts: tuple[Fact, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = partial(run_tiny, deep, tiny_facts, tmp_path)
    resumed, calls = interrupted(run, monkeypatch, collecting, "measure", at=4)
    assert len(calls) == 4 + 3
    assert json.dumps(resumed.metrics) == json.dumps(finished.metrics)


def test_a_model_that_can_do_too_little_is_told_so(deep: Model, tiny_facts: tuple[Fact, ...], tmp_path: Path):
    unable = (tiny_facts[-1],)
    run = run_tiny(deep, unable, tmp_path, Config(kinds=("name",), facts=1, check=8))
    assert run.report["answer"].startswith(
        "Too few facts to say: the model says the right value in both runs of 0 of 1"
    )
    assert "What was found" not in [section["title"] for section in run.report["sections"]]
    write_report(run.path, run.report)


# --- which runs there are


def test_ways_take_each_fact_both_ways_or_in_turn(
    deep: Model, tiny_facts: tuple[Fact, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(collecting, "facts", lambda _: tiny_facts)
    both = cases_of(Config(kinds=("code", "name"), facts=3, ways=2), deep.tokenizer)
    one = cases_of(Config(kinds=("code", "name"), facts=3, ways=1), deep.tokenizer)
    assert [case.fact for case in both[::2]] == [case.fact for case in one] == [fact.id for fact in tiny_facts]
    for there, back in zip(both[::2], both[1::2], strict=True):
        assert (there.base, there.donor) == (back.donor, back.base)
        assert (there.metric.right, there.metric.wrong) == (back.metric.wrong, back.metric.right)
        assert there.half == back.half
    assert [case.base for case in one] == [both[2 * place + place % 2].base for place in range(len(one))]
    assert sorted(case.half for case in one) == [0, 0, 0, 1, 1, 1]


def test_the_turn_of_the_fact_is_cut_around_the_value(deep: Model, tiny_facts: tuple[Fact, ...]):
    prompt = pair(tiny_facts[0], deep.tokenizer).prompts[0]
    cut = divided(prompt)
    assert cut.names == ("system", "T1", BEFORE, VALUE, AFTER, "T2")
    assert cut.span(VALUE) == prompt.part("value")
    assert (cut.ids, cut.positions) == (prompt.ids, prompt.positions)


def test_a_run_tests_the_band_that_the_other_half_found(
    deep: Model, tiny_facts: tuple[Fact, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(collecting, "facts", lambda _: tiny_facts)
    case = cases_of(SMALL, deep.tokenizer)[0]
    bands = {"V": {case.half: range(0, 1), 1 - case.half: range(1, 3)}}
    table = measure_bands(deep, case, bands)
    assert dict(zip(table["where"], table["band"], strict=True)) == {"inside": "1–2", "outside": "0+3"}


# --- numbers of tables with known answers


@pytest.mark.parametrize(
    ("effects", "band"),
    [
        ([0.0, 0.1, 0.5, 0.4, 0.0], range(2, 4)),
        ([1.0, 0.0, 0.0], range(0, 1)),
        ([0.5, 0.0, 0.5], range(0, 3)),
        ([-0.2, 0.6, 0.6, -0.1], range(1, 3)),
        ([-0.5, 0.2], None),
        ([0.0, 0.0], None),
    ],
)
def test_a_band_is_the_smallest_run_that_holds_its_share(effects: list[float], band: range | None):
    assert band_of(np.array(effects)) == band


def table_with(
    shares: Mapping[str, float], at: Mapping[str, int], facts: int = 16, noise: float = 0.02
) -> pd.DataFrame:
    """Facts whose K and V carry these shares, each read at one layer of the value's slots; each way is about −5."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for number in range(facts):
        way = -5.0 + rng.normal(0, 0.5)
        known = {"pair": number, "cluster": f"f{number}", "kind": "code", "half": number % 2, "able": True, "way": way}
        known |= {"base": 2.5, "donor": 2.5 + way}
        own = {part: share + rng.normal(0, noise) for part, share in shares.items()} | {"KV": 1.0}

        def cell(effect: float, known: dict[str, Any] = known, **labels: Any) -> None:
            rows.append(
                {**known, "effect": effect, "value": 2.5 + effect, "normalised": effect / known["way"], **labels}
            )

        for part, share in own.items():
            cell(share * way, grid=EVERYTHING, part=part)
            for segment in ("system", VALUE, "T2"):
                cell(share * way if segment == VALUE else 0.0, grid=WHOLE, segment=segment, part=part)
            for layer in range(N_LAYERS):
                hit = share * way if at.get(part) == layer else 0.0
                cell(hit, grid=LAYERS, segment=VALUE, part=part, layer=layer)
                if part != "KV":
                    cell(hit, grid=HEADS, segment=VALUE, part=part, layer=layer, head=0, score=2 * hit, linear=-hit)
            if part != "KV":
                cell(0.9 * share * way, grid=BANDS, part=part, where="inside")
                cell(0.1 * share * way, grid=BANDS, part=part, where="outside")
        cell(0.0, grid=SAME, part="KV")
    return pd.DataFrame(rows)


def numbers_of(table: pd.DataFrame) -> dict[str, Any]:
    return analyse(table, None, bands_by_half(table, N_LAYERS), Config(), N_LAYERS)


def test_known_shares_layers_and_bands_come_back():
    metrics = numbers_of(table_with({"K": 0.1, "V": 0.8}, {"K": 3, "V": 2}))
    assert metrics["everything"]["V"]["mean"] == pytest.approx(0.8, abs=0.02)
    assert metrics["difference"]["mean"] == pytest.approx(0.7, abs=0.03)
    assert metrics["interaction"]["mean"] == pytest.approx(0.1, abs=0.03)
    assert metrics["bands"]["V"]["layers"] == [2, 2]
    assert metrics["bands"]["V"]["halves"] == [[2, 2], [2, 2]]
    assert metrics["bands"]["V"]["of_whole"]["mean"] == pytest.approx(0.9)
    assert metrics["bands"]["V"]["outside"]["mean"] == pytest.approx(0.08, abs=0.01)
    (value,) = [cell for cell in metrics["layers"] if (cell["layer"], cell["part"]) == (2, "V")]
    assert value["low"] <= value["mean"] <= value["high"]
    assert metrics["attribution"]["score_V"]["median"] == pytest.approx(1)
    assert metrics["attribution"]["linear_V"]["median"] == pytest.approx(-1)


@pytest.mark.parametrize(
    ("shares", "start"),
    [
        ({"K": 0.1, "V": 0.8}, "The fact is read from V, at layer 2: "),
        ({"K": 0.8, "V": 0.1}, "The fact is read from K, at layer 3: "),
        ({"K": 0.5, "V": 0.5}, "The fact is not read from one of K and V more than"),
        ({"K": 0.0, "V": 0.0}, "That K or V alone carries the fact was not detected"),
    ],
)
def test_the_answer_follows_the_intervals(shares: dict[str, float], start: str):
    metrics = numbers_of(table_with(shares, {"K": 3, "V": 2}))
    assert answer(metrics).startswith(start)
    if "is read from" in start:
        assert "value's own slots alone gives" in answer(metrics)
        assert "on the other give 90.0 %" in answer(metrics)


def test_what_both_need_and_what_both_do_are_told_apart():
    needed = findings(numbers_of(table_with({"K": 0.1, "V": 0.5}, {"V": 2})))
    doubled = findings(numbers_of(table_with({"K": 0.9, "V": 0.9}, {"V": 2})))
    assert "Part of the effect needs both" in needed[1]
    assert "each do what the other does" in doubled[1]
    assert any(
        "is V of layer 2, head 0: 99" in sentence or "is V of layer 2, head 0: 100" in sentence for sentence in needed
    )
    assert any(sentence.startswith("K: single layers do not add up") for sentence in needed)


def test_few_facts_and_a_broken_control_are_warned_of():
    few = table_with({"K": 0.1, "V": 0.8}, {"K": 3, "V": 2}, facts=6)
    assert warnings(numbers_of(few))[0].startswith("6 facts are too few for an interval")
    assert numbers_of(table_with({"K": 0.1, "V": 0.8}, {}, facts=3))["enough"] is False
    broken = table_with({"K": 0.1, "V": 0.8}, {"K": 3, "V": 2})
    broken.loc[(broken["grid"] == WHOLE) & (broken["segment"] == "system"), "effect"] = 0.5
    assert "Light cone" in warnings(numbers_of(broken))[0]
