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
from kvprobe.studies.memento_toy.closing import (
    BEYOND,
    ERASED,
    EVERYTHING,
    OPEN,
    RANDOM,
    STAND_IN,
    answers_of,
    measure_closing,
    states_of,
)
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
    assert findings.values("by_distance", "distance", model=MAIN, arm=RETAINED) == [1, 2]
    assert findings.values("shown", "distance", model=MAIN) == [-1, 0]
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
    for name in (other, earlier):
        for arm in (RETAINED, RESTART):
            assert findings.at("right", model=name, arm=arm) == findings.at("right", model=MAIN, arm=arm)
            keys = {"probe": LINEAR, "arm": arm, "layer": 2}
            assert findings.at("by_layer", model=name, **keys) == findings.at("by_layer", model=MAIN, **keys)
    over_seeds = findings.at("seeds", probe=LINEAR, arm=RETAINED, distance=2)
    assert over_seeds.mean == findings.at("by_distance", model=MAIN, probe=LINEAR, arm=RETAINED, distance=2).mean
    assert over_seeds.clusters == 2
    assert set(findings.values("by_training", "model")) == {MAIN, earlier}
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


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_stand_ins_are_the_hidden_blocks_of_a_run_that_is_otherwise_the_same(keep: int):
    model, traces, rng = toy(), traces_of(), np.random.default_rng(0)
    others = [draw_alike(trace, rng) for trace in traces]
    for written in stood_in(model, rows_of(model, traces), rows_of(model, others), keep, 4):
        hidden = max(0, written.number - 1 - keep)
        spliced = [
            replace(own, blocks=(*other.blocks[:hidden], *own.blocks[hidden:]))
            for own, other in zip(traces, others, strict=True)
        ]
        *_, last = retained(model, rows_of(model, spliced), keep, written.number)
        same(written.vectors, last.vectors)
        assert torch.equal(written.likeliest, last.likeliest)


@pytest.mark.parametrize("keep", [0, 1])
def test_mementos_after_stand_ins_hold_nothing_of_hidden_blocks(keep: int):
    """To the bit: each trace is read alone, as rows of one batch round otherwise."""
    model, (trace,), rng = toy(), traces_of(1), np.random.default_rng(0)
    stand_in, other = draw_alike(trace, rng), draw_alike(trace, rng)
    changed = replace(trace, blocks=(other.blocks[0], *trace.blocks[1:]))
    assert changed != trace
    runs = [
        [one.vectors for one in stood_in(model, rows_of(model, [some]), rows_of(model, [stand_in]), keep, 4)]
        for some in (trace, changed)
    ]
    assert [*map(torch.equal, *runs)] == [False] * (1 + keep) + [True] * (3 - keep)


def test_a_tokenizer_that_does_not_know_the_words_is_refused():
    refused(lambda: rows_of(models.any_model(), traces_of(1)), "one token for each digit", "kvprobe train memento")


def test_words_are_looked_up_as_the_template_writes_them():
    model, traces = toy(), traces_of()
    assert rows_of(model, traces) == model.tokens([trace.conversation() for trace in traces])


# ---- sites


def test_all_layers_are_read_next_to_the_block_and_the_last_one_farther_off():
    config = Config(blocks=6, block=2, keep=1)
    sites = sites_of(config, 3, everywhere=True)
    assert len(set(sites)) == len(sites)
    assert {site.distance for site in sites if site.arm == RESTART} == {2, 3, 4}
    assert {site.distance for site in sites if site.layer == 0} == {0, 2}
    assert {site.distance for site in sites if site == Site(RETAINED, site.distance, 2)} == {-1, 0, 1, 2, 3, 4}
    nearest = [Site(arm, 2, layer) for arm in (RETAINED, RESTART) for layer in range(3)]
    assert sites_of(config, 3, everywhere=False) == nearest


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
    *_, last = retained(model, mixed, keep, config.hidden_from - 1)
    cache = hide(last.cache, last.number, keep)
    block, memento = own[0].span(f"block {config.hidden_from}"), own[0].span(f"memento {config.hidden_from}")
    cache, _ = model.extend(cache, [row[block] for row in own])
    scores = [
        model.extend(cache, [row[memento] for row in some], logits=4)[1][:, :3].log_softmax(-1) for some in (own, other)
    ]
    stated = [torch.tensor([row.ids[memento][1:] for row in some])[:, :, None] for some in (own, other)]
    text, rival = (score.gather(2, ids).sum((1, 2)).numpy() for score, ids in zip(scores, stated, strict=True))
    changed, own_rows = rows.loc[(OTHER_SUM, BOTH)], rows.loc[(OWN, BOTH)]
    np.testing.assert_allclose(changed["margin"], text - rival, atol=1e-4)
    assert not np.allclose(own_rows["margin"], text - rival, atol=1e-4)
    base = retained(model, own, keep, config.hidden_from)
    before = [*base][-1].likeliest.all(1).double().numpy()
    np.testing.assert_array_equal(own_rows["right"], before)
    assert own_rows["kl"].abs().max() == own_rows["turned"].max() == 0
    assert changed["kl"].min() > 1e-4
    assert rows.loc[(OTHER_DIGITS, "K")]["margin"].isna().all()


# ---- the channel, closed


def test_what_goes_beyond_the_sum_is_nothing_on_average_given_the_sum():
    rng = np.random.default_rng(0)
    traces = [draw_trace(rng, "sum", 2) for _ in range(4000)]
    of_sum = [trace for trace in traces if sum(trace.blocks[0]) == 22]
    labels = answers_of(of_sum, 1, SMALL, whole=False)
    assert labels.shape == (len(of_sum), 10 * DIGITS)
    assert labels.mean(0).abs().max() < 5 * (0.1 / len(of_sum)) ** 0.5
    assert labels.unflatten(1, (DIGITS, 10)).sum(2).abs().max() < 1e-9
    whole = answers_of(of_sum, 1, SMALL, whole=True)
    assert set(whole.unique().tolist()) == {0.0, 1.0}


def test_erasers_take_what_covaries_and_leave_the_first_layer_alone():
    """No block reaches K or V of the first layer; in later ones, those of a memento covary with its block's digits."""
    config, rng = replace(SMALL, closed=900, batch=300), np.random.default_rng(3)
    traces = [draw_trace(rng, "sum", 4) for _ in range(900)]
    rows = pd.concat([measure_closing(toy(), traces, config, state) for state in (OPEN, STAND_IN, BEYOND, RANDOM)])
    ranks = rows[rows["measure"] == "rank"].set_index(["state", "layer"])["rank"]
    assert ranks[BEYOND, 0] < 0.25  # one site in twenty loses a direction by chance
    assert ranks[BEYOND, 2] > 3
    assert ranks[RANDOM, 2] == pytest.approx(ranks[BEYOND, 2], rel=0.3)
    read = rows[rows["measure"] == "probe"].groupby("state")[["right", "alike"]].mean()
    assert read["right"][OPEN] > read["alike"][OPEN] + 0.02
    assert read["right"][STAND_IN] == pytest.approx(read["alike"][STAND_IN], abs=0.06)


def test_all_that_copies_do_not_say_is_everything():
    assert states_of(replace(SMALL, content="copy")) == [OPEN, STAND_IN, EVERYTHING, RANDOM, RESTART]
    assert set(states_of(SMALL)) == {OPEN, STAND_IN, *ERASED, RESTART}


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
    samples, answers, reach, changed, closing = [], [], [], [], []
    for model, role in roles:
        names = {"model": model, "role": role}
        everywhere = role != CHECKPOINT
        for site in sites_of(config, LAYERS, everywhere=everywhere):
            for part, probe in (
                (BOTH, LINEAR),
                *([(BOTH, MLP)] if everywhere else []),
                *((part, LINEAR) for part in PARTS),
            ):
                right = floor + (leak(traces) if site.arm == RETAINED and site.layer > 1 else 0.0)
                keys = {**names, **site._asdict(), "part": part, "probe": probe, "trace": traces}
                samples.append({**keys, "right": right, "alike": floor if probe == LINEAR else np.nan})
        for arm in (RETAINED, RESTART):
            for memento in range(1 if arm == RETAINED else config.hidden_from, config.blocks + 1):
                right = 0.5 + (kept(traces) if arm == RETAINED else 0.0) - 0.1 * (role == CHECKPOINT)
                answers.append({**names, "arm": arm, "memento": memento, "trace": traces, "right": right})
        for layer in range(LAYERS):
            reach.append({**names, "layer": layer, "near": layer < 2, "varies": near if layer < 2 else 0.5})
        parts = [(kind, part) for kind in (OTHER_DIGITS, OTHER_SUM) for part in (*PARTS, BOTH)]
        for condition, part in [(OWN, BOTH), (DONOR, BOTH), *parts] if everywhere else ():
            turned = used(traces) if condition == OTHER_DIGITS else 0.0
            margins = {OWN: 10.0, DONOR: -10.0, OTHER_DIGITS: np.nan, OTHER_SUM: 10.0 - 20.0 * way(traces)}
            row = {"condition": condition, "part": part, "trace": traces, "right": 0.9, "turned": turned, "kl": 0.01}
            changed.append({**names, **row, "margin": margins[condition]})
    for state in states_of(config):
        for memento in range(1, config.blocks + 1):
            right = 0.9 + (harm(traces) if state in (STAND_IN, *ERASED) else 0.0)
            closing.append({"measure": "answer", "state": state, "memento": memento, "trace": traces, "right": right})
        read = {"measure": "probe", "state": state, "trace": traces, "alike": floor}
        closing.append({**read, "right": floor + (left(traces) if state != RESTART else 0.0)})
        closing.append({"measure": "rank", "state": state, "layer": np.arange(LAYERS), "rank": 3.0})
    tables = {"samples": samples, "answers": answers, "changed": changed, "closing": closing}
    joined = {name: pd.concat(map(pd.DataFrame, rows), ignore_index=True) for name, rows in tables.items()}
    return joined | {"reach": pd.DataFrame(reach)}


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
    quiet = {name: normal(0.05) for name in ("leak", "kept", "left", "harm")}
    quiet["used"] = normal(0.01, 0.01)
    tables = made_up(PLAIN, bound, roles=ALL[:1], way=normal(0.3, 0.5), **quiet)
    return conclude(tables, PLAIN, MODEL)


def test_planted_numbers_are_found():
    findings = concluded().findings
    assert findings.at("leak", model=MAIN).mean == pytest.approx(0.2)
    assert findings.at("hidden_by_layer", model=MAIN, layer=0).mean == pytest.approx(0.0)
    assert findings.at("hidden_by_distance", model="other", distance=5).mean == pytest.approx(0.2)
    assert findings.at("seeds_hidden", distance=5).clusters == 2
    assert findings.at("beyond_text", model=MAIN).mean == pytest.approx(0.34 - text_of(PLAIN, 1))
    assert findings.at("kept", model="other").mean == pytest.approx(0.4)
    assert findings.at("follows", model=MAIN).mean == pytest.approx(0.01)
    assert findings.at("way", model=MAIN, part="K").mean == pytest.approx(0.01)
    assert findings.at("by_layer", model=MAIN, probe=LINEAR, arm=RETAINED, layer=0).mean == pytest.approx(0.14)
    assert findings.values("by_training", "accuracy") == [0.8, 0.9]
    assert findings.at("rank", state=BEYOND, layer=3).mean == 3
    assert {findings.where(claim.finding)[0].comparisons for claim in STUDY.claims} == {20}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, "Retained mementos hold hidden digits beyond what is in the text"),
        ({"leak": flat(0.0)}, "hold nothing of hidden digits that was detected"),
        ({"leak": flat(-0.1)}, "which cannot be: doubt the run"),
        ({}, "it is more than any reader of the text in view could know (16 %)"),
        ({"leak": flat(-0.1)}, "less than a perfect reader of the text in view would know"),
        ({"used": flat(0.01)}, "changes about one memento in a hundred"),
        ({"used": flat(0.5)}, "changes more than one memento in a hundred"),
        ({}, "the model goes by the text more than by the hidden block"),
        ({"way": flat(0.9)}, "the model goes by the hidden block more than by the text"),
        ({}, "a restart costs right mementos"),
        ({"kept": flat(-0.3)}, "a restart gives more right mementos"),
        ({}, "nothing that was detected can be read, and no change in right mementos was detected"),
        ({"harm": flat(-0.4)}, "fewer mementos are right"),
        ({"left": flat(0.4)}, "some of it can be read"),
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
