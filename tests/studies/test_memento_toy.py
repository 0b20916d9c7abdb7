"""The memento_toy study: whole runs on a tiny toy, how traces are read, and numbers of made-up tables."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.studies import memento_toy
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.changing import DONOR, OTHER_DIGITS, OTHER_SUM, OWN, draw_pair, measure_changed
from kvprobe.studies.memento_toy.closing import BEYOND, ERASED, OPEN, RANDOM, STAND_IN, labels_of, measure_closing
from kvprobe.studies.memento_toy.collect import CHECKPOINT, MAIN, SEED, UNTRAINED
from kvprobe.studies.memento_toy.conclude import conclude, text_of
from kvprobe.studies.memento_toy.probes import BOTH, LINEAR, MLP, PARTS, RESTART, RETAINED, Site, sites_of
from kvprobe.studies.memento_toy.reading import hide, restarted, retained, rows_of, stood_in, vectors_of
from kvprobe.studies.memento_toy.study import STUDY
from kvprobe.tasks.mementos import DIGITS, Trace, draw_alike, draw_trace
from tests import models
from tests.refusals import refused
from tests.studies.runs import answer_of, assert_figures, in_steps
from tests.toy import TINY, follow, toy

SMALL = Config(blocks=4, block=2, traces=80, changed=8, closed=48, batch=40)
LAYERS, TRACES = 4, 24
VIEWS = [TINY, replace(TINY, keep=1), replace(TINY, keep=2, content="copy")]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root, model = tmp_path_factory.mktemp("runs"), toy()
    return in_steps(lambda: memento_toy.run(SMALL, root, model=model))


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert set(findings.values("by_layer", "model")) == {MAIN, UNTRAINED}
    assert findings.values("by_distance", "distance", model=MAIN, arm=RETAINED) == [-1, 0, 1, 2]
    assert_figures(finished, *(figure.file for figure in STUDY.figures))
    assert finished.metrics["controls"][0]["holds"]
    assert not (finished.path / "parts").exists()


def test_other_seeds_and_checkpoints_are_read_beside_the_model(tmp_path: Path):
    for name in ("other", "earlier"):
        model = toy()
        model.lanes.plain.save_pretrained(tmp_path / name)
        model.tokenizer.save_pretrained(tmp_path / name)
    other, earlier = str(tmp_path / "other"), str(tmp_path / "earlier")
    config = replace(SMALL, seeds=(other,), checkpoints=(earlier,), mlp=False, untrained=False)
    findings = Conclusion.of(memento_toy.run(config, tmp_path, model=toy()).metrics).findings
    assert findings.values("leak", "model") == [MAIN, other]
    assert findings.values("right", "model") == [MAIN, other, earlier]
    # All three have the same weights.
    ours, theirs = (
        findings.at("by_distance", model=name, probe=LINEAR, arm=RETAINED, distance=2) for name in (MAIN, other)
    )
    assert ours == theirs
    assert findings.at("seeds", probe=LINEAR, arm=RETAINED, distance=2).mean == ours.mean
    assert findings.at("seeds", probe=LINEAR, arm=RETAINED, distance=2).clusters == 2
    assert findings.values("by_distance", "distance", model=earlier) == [1]


# ---- reading


def traces_of(count: int = 6, seed: int = 5, content: str = "sum") -> list[Trace]:
    rng = np.random.default_rng(seed)
    return [draw_trace(rng, "sum" if content == "sum" else "copy", TINY.blocks) for _ in range(count)]


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("recipe", VIEWS, ids=lambda recipe: recipe.name)
def test_retained_mementos_are_those_of_a_cache_whose_blocks_are_masked(recipe: Any):
    model, traces = toy(), traces_of(content=recipe.content)
    cache, _ = follow(recipe, model, traces, at_once=9)
    for written in retained(model, rows_of(model, traces), recipe.keep, TINY.blocks):
        same(written.vectors, vectors_of(written.number, cache))


def test_restarted_mementos_are_those_of_the_policy():
    model, traces = toy(), traces_of()
    cache, _ = follow(replace(TINY, provenance="recomputed"), model, traces, at_once=9)
    *_, last = restarted(model, rows_of(model, traces), 0, range(1, TINY.blocks + 1))
    same(last.vectors, vectors_of(TINY.blocks, cache))


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_restart_reads_what_is_in_view_and_nothing_else(keep: int):
    model, traces = toy(), traces_of()
    for written in restarted(model, rows_of(model, traces), keep, range(1, TINY.blocks + 1)):
        hidden = [f"block {number}" for number in range(1, written.number - keep)]
        fresh = model.prefill(model.tokens([trace.conversation().without(*hidden) for trace in traces]))
        same(written.vectors, vectors_of(written.number, fresh))


@pytest.mark.parametrize("keep", [0, 1])
def test_blocks_that_stand_in_for_themselves_change_nothing(keep: int):
    model, traces = toy(), traces_of()
    rows = rows_of(model, traces)
    pairs = zip(stood_in(model, rows, rows, keep, 4), retained(model, rows, 0 if keep == 0 else keep, 4), strict=True)
    for stand_in, written in pairs:
        if keep == 0 or written.number <= 1 + keep:
            same(stand_in.vectors, written.vectors)


def test_mementos_after_stand_ins_hold_nothing_of_hidden_blocks():
    """To the bit: each trace is read alone, as rows of one batch round otherwise."""
    model, (trace,) = toy(), traces_of(1)
    rng = np.random.default_rng(0)
    stand_in, other = draw_alike(trace, rng), draw_alike(trace, rng)
    changed = replace(trace, blocks=(other.blocks[0], *trace.blocks[1:]))
    assert changed != trace
    runs = [
        {one.number: one.vectors for one in stood_in(model, rows_of(model, [some]), rows_of(model, [stand_in]), 0, 4)}
        for some in (trace, changed)
    ]
    assert [torch.equal(runs[0][number], runs[1][number]) for number in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_tokenizer_that_does_not_know_the_words_is_refused():
    refused(lambda: rows_of(models.any_model(), traces_of(1)), "one token for each digit", "kvprobe train memento")


def test_words_are_looked_up_as_the_template_writes_them():
    model, traces = toy(), traces_of()
    assert rows_of(model, traces) == model.tokens([trace.conversation() for trace in traces])


# ---- sites


def test_all_layers_are_read_next_to_the_block_and_the_last_one_farther_off():
    config = Config(blocks=6, block=2, keep=1)
    sites = sites_of(config, 3, whole=True)
    assert len(set(sites)) == len(sites)
    assert {site.distance for site in sites if site.arm == RESTART} == {2, 3, 4}
    assert {site.distance for site in sites if site.layer == 0} == {0, 1, 2}
    assert Site(RETAINED, -1, 2) in sites
    assert sites_of(config, 3, whole=False) == [
        Site(arm, 2, layer) for arm in (RETAINED, RESTART) for layer in range(3)
    ]


@pytest.mark.parametrize(
    ("config", "distance", "share"),
    [
        (Config(), 1, 0.1603),
        (Config(), 7, 0.1603),
        (Config(), 0, 1.0),
        (Config(), -1, 0.1),
        (Config(keep=1), 1, 1.0),
        (Config(keep=1), 2, 0.1603),
        (Config(content="copy"), 1, 0.1),
        (Config(content="copy"), 0, 1.0),
    ],
)
def test_the_bound_of_text_counts_what_is_in_view(config: Config, distance: int, share: float):
    assert text_of(config, distance) == pytest.approx(share, abs=1e-4)


def test_a_block_that_is_never_hidden_is_refused():
    refused(lambda: Config(block=10), "from block 11 on", "a trace has 10")
    refused(lambda: Config(block=8, keep=2), "from block 11 on where 2 stay in view")


# ---- the hidden block, exchanged


def test_exchanged_blocks_fit_the_text_or_do_not():
    for trace, changed in (draw_pair(SMALL, np.random.default_rng(seed)) for seed in range(20)):
        assert set(changed) == {OTHER_DIGITS, OTHER_SUM}
        assert changed[OTHER_DIGITS].mementos == trace.mementos
        assert changed[OTHER_SUM].mementos != trace.mementos
        for other in changed.values():
            assert [one != two for one, two in zip(other.blocks, trace.blocks, strict=True)] == [
                False,
                True,
                False,
                False,
            ]
    _, changed = draw_pair(replace(SMALL, content="copy"), np.random.default_rng(0))
    assert set(changed) == {OTHER_DIGITS}


@pytest.mark.parametrize("keep", [0, 1])
def test_through_k_and_v_an_exchange_is_the_run_with_the_other_block(keep: int):
    model, config = toy(), replace(SMALL, keep=keep)
    pairs = [draw_pair(config, np.random.default_rng(seed)) for seed in range(4)]
    rows = measure_changed(model, pairs, config).set_index(["condition", "part", "trace"]).sort_index()
    own = rows_of(model, [trace for trace, _ in pairs])
    other = rows_of(model, [changed[OTHER_SUM] for _, changed in pairs])
    span = own[0].span("block 2")
    mixed = [row[: span.start] + theirs[span] + row[span.stop :] for row, theirs in zip(own, other, strict=True)]
    *_, last = retained(model, mixed, keep, config.first - 1)
    cache = hide(last.cache, last.number, keep)
    block, memento = own[0].span(f"block {config.first}"), own[0].span(f"memento {config.first}")
    cache, _ = model.extend(cache, [row[block] for row in own])
    scores = [
        model.extend(cache, [row[memento] for row in some], logits=4)[1][:, :3].log_softmax(-1) for some in (own, other)
    ]
    stated = [torch.tensor([row.ids[memento][1:] for row in some])[:, :, None] for some in (own, other)]
    text, rival = (score.gather(2, ids).sum((1, 2)).numpy() for score, ids in zip(scores, stated, strict=True))
    expected = rows.loc[(OTHER_SUM, BOTH)]
    np.testing.assert_allclose(expected["logprob"], text, atol=1e-4)
    np.testing.assert_allclose(expected["margin"], text - rival, atol=1e-4)
    assert not np.allclose(rows.loc[(OWN, BOTH)]["logprob"], text, atol=1e-4)
    assert rows.loc[(OTHER_DIGITS, "K")]["margin"].isna().all()


# ---- the channel, closed


def test_what_goes_beyond_the_sum_is_nothing_on_average_given_the_sum():
    rng = np.random.default_rng(0)
    traces = [draw_trace(rng, "sum", 2) for _ in range(4000)]
    of_sum = [trace for trace in traces if sum(trace.blocks[0]) == 22]
    labels = labels_of(of_sum, 1, SMALL, whole=False)
    assert labels.shape == (len(of_sum), 10 * DIGITS)
    assert labels.mean(0).abs().max() < 5 * (0.1 / len(of_sum)) ** 0.5
    assert labels.unflatten(1, (DIGITS, 10)).sum(2).abs().max() < 1e-9
    whole = labels_of(of_sum, 1, SMALL, whole=True)
    assert set(whole.unique().tolist()) == {0.0, 1.0}


def test_erasers_take_what_covaries_and_leave_the_first_layer_alone():
    """No block reaches K or V of the first layer; in later ones, those of a memento covary with its block's digits."""
    config = replace(SMALL, closed=900, batch=300)
    rng = np.random.default_rng(3)
    tables = measure_closing(toy(), [draw_trace(rng, "sum", 4) for _ in range(900)], config, rng)
    ranks = tables["ranks"].groupby(["kind", "layer"])["rank"].mean()
    assert ranks[BEYOND, 0] <= 1  # at most one direction of many can be above the largest of shuffled labels by chance
    assert ranks[BEYOND, 2] > 3
    assert ranks[RANDOM, 2] == pytest.approx(ranks[BEYOND, 2], rel=0.3)
    assert set(tables["closed"]["state"]) == {OPEN, STAND_IN, *ERASED, RESTART}
    held = tables["left"].groupby("state")["right"].mean()
    assert held[OPEN] > held[STAND_IN]


# ---- made-up tables

Number = Callable[[np.ndarray], np.ndarray]


def flat(value: float) -> Number:
    return lambda traces: np.full(len(traces), value) + 0.02 * (-1.0) ** traces


LEVELS: dict[str, Number] = {
    "leak": flat(0.2),
    "kept": flat(0.4),
    "used": flat(0.0),
    "way": flat(0.01),
    "left": flat(0.0),
    "harm": flat(0.0),
}
"""What is made up: `used`, `left` and `harm` are nothing."""
ALL = ((MAIN, MAIN), ("other", SEED), ("early", CHECKPOINT))
PLAIN, SEEDED = Config(), Config(seeds=("other",))


def made_up(
    config: Config = SEEDED,
    floor: float = 0.14,
    near: float = 1e-7,
    roles: tuple[tuple[str, str], ...] = ALL,
    **levels: Number,
) -> dict[str, pd.DataFrame]:
    leak, kept, used, way, left, harm = (LEVELS | levels).values()
    traces = np.arange(TRACES)
    samples, answers, reach, changed, closed, still = [], [], [], [], [], []
    for model, role in roles:
        names = {"model": model, "role": role}
        for site in sites_of(config, LAYERS, whole=role != CHECKPOINT):
            for part, probe in ((BOTH, LINEAR), (BOTH, MLP), *((part, LINEAR) for part in PARTS)):
                right = floor + (leak(traces) if site.arm == RETAINED and site.layer > 1 else 0.0)
                samples.append(
                    {**names, **site._asdict(), "part": part, "probe": probe, "trace": traces, "right": right}
                )
        for arm in (RETAINED, RESTART):
            for memento in range(1, config.blocks + 1):
                right = 0.5 + (kept(traces) if arm == RETAINED else 0.0)
                answers.append({**names, "arm": arm, "memento": memento, "trace": traces, "right": right})
        reach += [
            {**names, "layer": layer, "near": layer < 2, "varies": near if layer < 2 else 0.5} for layer in range(4)
        ]
        parts = [
            (OWN, BOTH),
            (DONOR, BOTH),
            *((kind, part) for kind in (OTHER_DIGITS, OTHER_SUM) for part in (*PARTS, BOTH)),
        ]
        for condition, part in parts if role != CHECKPOINT else ():
            right = 0.9 + (used(traces) if condition == OTHER_DIGITS else 0.0)
            margins = {OWN: 10.0, DONOR: -10.0, OTHER_DIGITS: np.nan, OTHER_SUM: 10.0 - 20.0 * way(traces)}
            row = {"condition": condition, "part": part, "trace": traces, "right": right, "logprob": -1.0}
            changed.append({**names, **row, "margin": margins[condition]})
    for state in (OPEN, STAND_IN, *ERASED, RESTART):
        for memento in range(1, config.blocks + 1):
            right = 0.9 + (harm(traces) if state in (STAND_IN, *ERASED) else 0.0)
            closed.append({"state": state, "memento": memento, "trace": traces, "right": right})
        still.append({"state": state, "trace": traces, "right": floor + (left(traces) if state != RESTART else 0.0)})
    ranks = [{"kind": kind, "layer": layer, "rank": 3} for kind in ERASED for layer in range(LAYERS)]
    tables = {"samples": samples, "answers": answers, "changed": changed, "closed": closed, "left": still}
    joined = {name: pd.concat(map(pd.DataFrame, rows), ignore_index=True) for name, rows in tables.items()}
    return joined | {"reach": pd.DataFrame(reach), "ranks": pd.DataFrame(ranks)}


MODEL = toy(replace(TINY, layers=LAYERS))


def concluded(**numbers: Any) -> Conclusion:
    return conclude(made_up(**numbers), SEEDED, MODEL)


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return SEEDED, concluded()


def noise(rng: np.random.Generator) -> Conclusion:
    """Nothing is there: neither arm nor exchange makes a difference."""

    def normal(size: float, mean: float = 0.0) -> Number:
        return lambda traces: rng.normal(mean, size, len(traces))

    bound = text_of(PLAIN, 1)
    quiet = {name: normal(0.05) for name in ("leak", "kept", "used", "left", "harm")}
    tables = made_up(PLAIN, bound, roles=ALL[:1], way=normal(0.3, 0.5), **quiet)
    return conclude(tables, PLAIN, MODEL)


def test_planted_numbers_are_found():
    findings = concluded().findings
    assert findings.at("leak", model=MAIN).mean == pytest.approx(0.2)
    assert findings.at("beyond_text", model=MAIN).mean == pytest.approx(0.34 - text_of(PLAIN, 1))
    assert findings.at("kept", model="other").mean == pytest.approx(0.4)
    assert findings.at("follows", model=MAIN).mean == pytest.approx(0.01)
    assert findings.at("way", model=MAIN, part="K").mean == pytest.approx(0.01)
    assert findings.at("by_layer", model=MAIN, probe=LINEAR, arm=RETAINED, layer=0).mean == pytest.approx(0.14)
    assert findings.at("seeds_leak", probe=LINEAR).clusters == 2
    assert findings.values("by_training", "accuracy") == [0.9]
    assert {findings.where(claim.finding)[0].comparisons for claim in STUDY.claims} == {17}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "Retained mementos hold digits that the text does not"),
        ({"leak": flat(0.0)}, "hold nothing of the hidden digits that was detected"),
        ({"leak": flat(-0.1)}, "which cannot be: doubt the run"),
        ({}, "That is more than any reader of the text in view could know (16 %)"),
        ({"leak": flat(-0.1)}, "less than a perfect reader of the text in view would know"),
        ({}, "changes the share of right mementos by nothing that was detected"),
        ({"used": flat(-0.5)}, "so the digits themselves are used"),
        ({}, "the model goes by the text more than by the hidden block"),
        ({"way": flat(0.9)}, "the model goes by the hidden block more than by the text"),
        ({}, "a restart costs right mementos"),
        ({"kept": flat(-0.3)}, "a restart gives more right mementos"),
        ({}, "the channel is closed, without harm that was detected"),
        ({"harm": flat(-0.4)}, "the channel is closed at a cost"),
        ({"left": flat(0.4)}, "this does not close the channel"),
    ],
)
def test_the_answer_follows_the_intervals(numbers: dict[str, Number], expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, SEEDED, concluded(**numbers), tmp_path)


def test_the_control_fails_where_the_first_layers_know():
    assert [concluded(near=near).controls[0].holds for near in (1e-7, 1e-3)] == [True, False]


def test_the_paper_stands_beside_runs_of_its_design_alone():
    designs = [PLAIN, Config(keep=1), Config(content="copy"), Config(block=3)]
    shown = [bool(conclude(made_up(config, roles=ALL[:1]), config, MODEL).facts["published"]) for config in designs]
    assert shown == [True, False, False, False]
