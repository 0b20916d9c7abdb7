"""The filter-poison study: a whole run on a tiny model, tables with known answers, and what the page claims of them."""

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.filter_poison.collect as collecting
from kvprobe.attention import LOOKS
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import changed_slots
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.layers import Component, restored_together
from kvprobe.layers.head_sets import FILTER, MATCHED, POISON
from kvprobe.report.findings import Findings
from kvprobe.report.views.patterns import heads_view
from kvprobe.studies.filter_poison import FALSE, Config
from kvprobe.studies.filter_poison.collect import NONE, STRUCK, heads_by_half, pairs_of
from kvprobe.studies.filter_poison.conclude import KINDS, STREAM, concluded, warnings_of
from kvprobe.studies.filter_poison.study import STUDY
from kvprobe.text.tokens import Tokens
from tests.experiments.made_up import answer_of
from tests.refusals import refused
from tests.tasks.made_up import FOUR_FACTS

SMALL = Config(kinds=("code",), prompts=4, families=("zeros:50", "distractor:50", FALSE), suffix=3, top=3, random=4)
MODEL, HOLD = "deep", [True, True]
N_LAYERS, N_HEADS = 4, 4


@pytest.fixture(autouse=True, scope="module")
def four_facts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "facts", lambda _, each: FOUR_FACTS[:each])
        yield


def test_every_component_is_restored_in_every_family_and_shown(finished: Run):
    maps: Any = finished.df("maps")
    assert set(maps["family"]) == {NONE, *SMALL.rates}
    restored = maps[maps["family"] == FALSE].groupby(["prompt", "kind"]).size().unstack()
    assert (restored[["head", "attn", "mlp"]] == [N_LAYERS * N_HEADS, N_LAYERS, N_LAYERS]).all(axis=None)
    assert (maps.loc[maps["family"] != NONE, "damage"] > 1e-4).all()
    assert "none can be judged" in answer(STUDY, finished)
    assert (finished.path / "report.html").read_text().count('data-component="AttentionView"') == 1


def test_sets_are_tested_on_the_half_that_they_were_not_found_on(finished: Run, deep: Model):
    heads: Any = finished.df("heads")
    by_half = heads_by_half(finished.df("maps"), SMALL)
    assert set(heads["sort"]) == {POISON, FILTER, POISON + MATCHED, FILTER + MATCHED}
    one = heads[(heads["family"] == FALSE) & (heads["half"] == 0) & (heads["sort"] == POISON)].iloc[0]
    [pair] = [pair for pair in pairs_of(SMALL, deep) if pair.id == one["prompt"]]
    clean, damaged = map(deep.prefill, pair.prompts)
    _, left = restored_together(deep, clean, damaged, pair.suffix, [by_half[1][POISON][0]], kept=SMALL.suffix)
    assert one["restored"] == pytest.approx(float(left[0]), abs=1e-5)
    assert heads.groupby(["prompt", "family", "sort"]).size().max() == SMALL.random


def test_blocks_are_exchanged_with_another_conversation(finished: Run, deep: Model):
    table: Any = finished.df("unrelated")
    assert table.groupby(["prompt", "family", "kind"]).size().eq(N_LAYERS).all()
    one, _, other, _ = pairs_of(SMALL, deep)
    clean, damaged = map(deep.prefill, one.prompts)

    def left(source: tuple[KVCache, Tokens] | None) -> float:
        """With the output of one MLP as in the run of a source."""
        group = [Component("mlp", 2)]
        return restored_together(deep, clean, damaged, one.suffix, [group], kept=SMALL.suffix, source=source)[1][0]

    [row] = table.query("prompt == @one.id and family == @FALSE and kind == 'mlp' and layer == 2").to_dict("records")
    assert row["restored"] == pytest.approx(left((deep.prefill(other.prompts[0]), other.suffix)), abs=1e-5)
    assert left((clean, one.suffix)) == pytest.approx(left(None), abs=1e-6), "its own clean run"
    assert left((damaged, one.suffix)) == pytest.approx(row["damage"], abs=1e-5), "the damaged run: nothing changes"
    assert min(abs(row["restored"] - known) for known in (left(None), row["damage"])) > 1e-4
    longer = pairs_of(replace(SMALL, suffix=4), deep)[2]
    refused(lambda: left((deep.prefill(longer.prompts[0]), longer.suffix)), "reads 4 tokens, but the suffix has 3")


def test_damage_strikes_what_was_said_and_nothing_else(deep: Model):
    pair = pairs_of(SMALL, deep)[0]
    struck = [{*changed_slots(clean, damaged).tolist()} for _, clean, damaged in collecting.damages(deep, SMALL, pair)]
    said = {place for place, name in enumerate(pair.prompts[0].segments) if name in STRUCK}
    assert struck[0] < said > struck[1]
    assert struck[2] == {place for place in said if len({prompt.ids[place] for prompt in pair.prompts}) > 1}


PI = {(0, 0): 0.4, (0, 1): 0.0, (0, 2): 0.0, (1, 0): -0.4, (1, 1): 0.0, (1, 2): 0.0}
TWO = Config(families=("zeros:50", "false"), top=1, random=6)
FOUND = {POISON: 0.5, FILTER: -0.3}


def made_up(pi: dict[tuple[int, int], float] = PI, chosen: dict[str, float] = FOUND, seed: int = 0) -> dict[str, Any]:
    """The tables of 16 conversations in two families, one with twenty times the damage: heads with these indices, and
    sets of heads of which the chosen have these and random ones 0.1."""
    rng, damage = np.random.default_rng([seed, 7]), {NONE: 0.0, "zeros": 1.0, FALSE: 20.0}
    runs: Any = pd.DataFrame(product(damage, [f"p{prompt:02}" for prompt in range(16)]), columns=["family", "prompt"])
    runs = runs.assign(half=np.arange(len(runs)) % 2, damage=runs["family"].map(damage))
    rows = [
        *({"kind": "head", "layer": layer, "head": head, "pi": mean} for (layer, head), mean in pi.items()),
        *({"kind": kind, "layer": layer, "pi": 0.0} for kind, layer in product(("attn", "mlp"), (0, 1))),
        {"kind": "band", "band": "0–1", "pi": 1.0},
    ]
    maps = runs.merge(pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"}), how="cross")
    spread = np.where(maps["kind"] == "band", 0, 0.05) * rng.normal(size=len(maps))
    maps = maps.assign(restored=maps["damage"] * (1 - maps["pi"] - spread), noised=0.9 * maps["damage"])
    maps = maps.assign(mass=maps["pi"], lift=maps["pi"], contribution=maps["layer"].astype(float))
    sets = [{"sort": sort, "draw": 0, "pi": mean} for sort, mean in chosen.items()]
    sets += [{"sort": sort + MATCHED, "draw": draw, "pi": 0.1} for sort, draw in product(chosen, range(TWO.random))]
    heads = runs[runs["family"] != NONE].merge(pd.DataFrame(sets), how="cross")
    heads = heads.assign(restored=heads["damage"] * (1 - heads["pi"] - rng.normal(0, 0.06, len(heads))))
    states = pd.DataFrame(product(damage, range(3)), columns=["family", "layer"])
    states = states.assign(**dict.fromkeys(STREAM, 0.1 * states["layer"]))
    blocks = maps.loc[maps["kind"].isin(("attn", "mlp")) & (maps["family"] != NONE)]
    blocks = blocks.assign(
        restored=blocks["restored"] + np.where(blocks["kind"] == "mlp", 0.7, -0.2) * blocks["damage"]
    )
    unrelated = blocks[["kind", "layer", "family", "damage", "restored", "prompt"]]
    return {"maps": maps, "states": states, "unrelated": unrelated, "heads": heads}


@cache
def example() -> tuple[Config, Conclusion]:
    conclusion = concluded(made_up(), TWO)
    view = heads_view(torch.full((1, 3, 1, 2), 0.5), ["one ", " two"], "A view.", damaged=[1])
    return TWO, replace(conclusion, facts={**conclusion.facts, "views": [asdict(view)]})


def noise(rng: np.random.Generator) -> Conclusion:
    """No head differs from any other, and sets of heads remove as much as random ones do."""
    tables = made_up(dict.fromkeys(PI, 0.0), {POISON: 0.1, FILTER: 0.1}, int(rng.integers(2**32)))
    looks = {look: rng.normal(size=len(tables["maps"])) for look in LOOKS}
    return concluded({**tables, "maps": tables["maps"].assign(**looks)}, TWO)


def test_verdicts_and_shares_are_those_that_were_put_in():
    findings = example()[1].findings
    assert findings.find("called", kind="head", layer=0, head=0, verdict=POISON)
    assert findings.find("called", kind="head", layer=1, head=0, verdict=FILTER)
    for family in ("zeros", FALSE):
        assert findings.at("pi", kind="head", layer=0, head=0, family=family).mean == pytest.approx(0.4, abs=0.05)
    for kind, more in {"mlp": -0.7, "attn": 0.2}.items():
        place = {"kind": kind, "layer": 1, "family": FALSE}
        assert findings.at("reaction", **place).mean == pytest.approx(more)
        assert findings.at("unrelated", **place).mean == pytest.approx(more, abs=0.05)
    assert findings.at("damage", family=FALSE).mean == findings.at("median_damage", family=FALSE).mean == 20
    assert findings.at("noised", band="0–1", family="zeros").mean == pytest.approx(0.9)
    assert findings.at("removed", family="all", sort=POISON, heads="chosen").mean == pytest.approx(0.5, abs=0.05)
    assert findings.at("beyond", sort=FILTER).mean == pytest.approx(-0.4, abs=0.05)
    assert [findings.at("overlap", sort=sort).mean for sort in FOUND] == [1, 1]
    assert findings.at("as_far", family="all", sort=FILTER).mean == 0
    assert findings.at("look_within", family="zeros", look="mass").mean > 0.7
    assert findings.get("look_within", family="zeros", look="contribution") is None  # the same for all heads of a layer


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (FOUND, ["takes away .* removes more.: as predicted.", "adds .* removes less.: as predicted."]),
        ({POISON: 0.5, FILTER: 0.01}, ["as predicted.", "removes less.: as predicted, but not shown to keep"]),
        ({POISON: 0.1, FILTER: 0.1}, ["not detected.: the prediction is not confirmed."] * 2),
        ({POISON: -0.3, FILTER: 0.5}, ["adds .*: the opposite of", "takes away .*: the opposite of"]),
    ],
)
def test_the_answer_says_whether_the_prediction_held(chosen: dict[str, float], said: list[str], tmp_path: Path):
    conclusion = concluded(made_up(dict.fromkeys(PI, 0.0), chosen), TWO)
    verdicts, *sentences = answer_of(STUDY, TWO, conclusion, tmp_path).split("Restoring together")
    assert verdicts.count("no more have a verdict than chance gives") == 3
    for pattern, sentence in zip(said, sentences, strict=True):
        assert re.search(pattern, sentence)


@pytest.mark.parametrize(("place", "row"), [(0, "family == 'none'"), (1, "family == 'zeros' and kind == 'band'")])
def test_a_control_fails_where_it_should(place: int, row: str):
    tables = made_up()
    assert [control.holds for control in concluded(tables, TWO).controls] == [True, True]
    tables["maps"].loc[tables["maps"].query(row).index[0], "restored"] = 0.01
    assert [control.holds for control in concluded(tables, TWO).controls] == [place == 1, place == 0]


@pytest.mark.parametrize("high", [1, 2])
def test_a_few_verdicts_that_chance_may_give_are_called_so(high: int):
    findings = Findings()
    for kind in KINDS:
        for verdict, count in ((POISON, 2), (FILTER, 0)):
            findings.number("count", count, kind=kind, verdict=verdict)
        for statistic, value in (("mean", 0.5), ("high", high)):
            findings.number("chance", value, kind=kind, statistic=statistic)
    assert [text.count("may be chance") for text in warnings_of(findings, 16)] == [1] * 3 * (high == 2)


def test_a_family_that_is_no_fault_is_refused(deep: Model):
    refused(lambda: pairs_of(Config(kinds=("code",), families=("zeroes:30", "false")), deep), "fault")
