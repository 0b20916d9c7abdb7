"""The ghost_state study: hand-made states, states that are cut off, whole runs on tiny models, made-up tables."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model, load
from kvprobe.report.findings import Findings
from kvprobe.stats import Estimate
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.collect import ANSWERS, HEADS, PROBES, REACH, RULES, UNTRAINED, read_model
from kvprobe.studies.ghost_state.conclude import ANSWERING, SEEING, conclude, findings_of, lasting
from kvprobe.studies.ghost_state.reading import (
    AT_ONCE,
    BOTH,
    ERASED,
    IN_VIEW,
    LATER,
    OF_STAND_IN,
    OWN_SLOTS,
    RESTART,
    RIVALS,
    STATE,
    TIMELESS,
    WIDEST,
    Texts,
    answers,
    arms_of,
    caches,
    draw_texts,
    narrowed,
    parts_of,
    refuse_joined,
    vectors,
)
from kvprobe.studies.ghost_state.study import STUDY
from kvprobe.studies.ghost_state.turns import ARMS, BLOCKS, READ, RIGHT, SHIFT, TURNS, read_mementos, read_toy
from kvprobe.studies.layer_readers import LINEAR, MLP, read_layers
from kvprobe.tasks.mementos import draw_changed
from kvprobe.tasks.recall import PAIRS, QUESTION
from kvprobe.training.memento import Memento
from kvprobe.training.recall import Recall
from kvprobe.training.schedule import Memory
from tests.experiments.made_up import answer_of
from tests.models.every import tiny
from tests.refusals import refused
from tests.studies.runs import whole_run
from tests.toy import toy

SMALL = Config(
    model="main", others=None, texts=80, pairs=2, distance=8, distances=(8, 9), capacities=(2,), mlp=False, batch=80
)


def small(memory: Memory = "hybrid") -> Model:
    return toy(Recall(memory=memory, layers=3, width=16, heads=2, inner=24, tested=4))


HYBRID = small()
OF_MEMENTOS = Memento(memory="hybrid", blocks=BLOCKS, layers=2, width=16, heads=2, inner=24, tested=2)
WRITTEN, LATER_V, OWN_V = "values written later", "V of later slots", "its own V"


def texts_for(model: Model, distance: int = 8, count: int = 6) -> Texts:
    return draw_texts(model, count, 3, distance, 0)


def moved(model: Model, texts: Texts, when: Any, arm: str, part: str) -> list[float]:
    """How far each layer of a part varies with the digits."""
    one, other = (vectors(model, caches(model, some, when, [arm])[arm], part) for some in (texts, texts.swapped))
    return [float(layer) for layer in (one - other).abs().amax((1, 2))]


@pytest.mark.parametrize("memory", ["hybrid", "mamba", "recurrent", "attention"])
def test_what_is_hidden_from_everything_at_once_reaches_nothing(memory: Memory):
    model = HYBRID if memory == "hybrid" else small(memory)
    texts = texts_for(model)
    both = caches(model, texts, AT_ONCE, [TIMELESS, RESTART])
    for part in parts_of(model, TIMELESS):
        assert max(moved(model, texts, AT_ONCE, TIMELESS, part)) == 0.0
        torch.testing.assert_close(*(vectors(model, cache, part) for cache in both.values()), atol=1e-5, rtol=1e-5)
    one, other = (answers(model, texts, cache, arm)["margin"] for arm, cache in both.items())
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_the_decay_of_hidden_tokens_tells_of_them_where_it_is_kept():
    assert max(moved(HYBRID, texts_for(HYBRID), AT_ONCE, BOTH, STATE)) > 1e-6


def test_what_was_read_in_view_of_the_turn_carries_it_but_in_the_first_layer():
    texts = texts_for(HYBRID)
    in_writes = moved(HYBRID, texts, LATER, TIMELESS, WRITTEN)
    assert in_writes[0] == 0.0, "the convolution reaches three tokens back, and eight are between"
    assert in_writes[1] > 1e-4
    assert max(moved(HYBRID, texts, LATER, TIMELESS, LATER_V)) > 1e-4


def test_an_erase_leaves_the_states_as_they_were_and_takes_the_slots():
    texts = texts_for(HYBRID)
    made = caches(HYBRID, texts, LATER, arms_of(HYBRID))
    torch.testing.assert_close(*(vectors(HYBRID, made[arm], STATE) for arm in (IN_VIEW, ERASED)), atol=0, rtol=0)
    assert max(moved(HYBRID, texts, LATER, ERASED, STATE)) > 1e-4
    stand_in = vectors(HYBRID, caches(HYBRID, texts.swapped, LATER, [ERASED])[ERASED], STATE)
    torch.testing.assert_close(vectors(HYBRID, made[OF_STAND_IN], STATE), stand_in, atol=0, rtol=0)


def test_states_that_are_cut_off_are_not_used():
    """With output projections of zero, what the states hold moves no answer."""
    model = small()
    plain: Any = model.lanes.plain
    for layer in plain.model.layers[:-1]:
        layer.linear_attn.out_proj.weight.data.zero_()
    cut = load(plain, tokenizer=model.tokenizer)
    texts = texts_for(cut)
    made = caches(cut, texts, LATER, [ERASED, BOTH, OF_STAND_IN])
    one, folded, of_other = (answers(cut, texts, cache, arm)["margin"] for arm, cache in made.items())
    np.testing.assert_allclose(one, folded, atol=1e-5)
    np.testing.assert_allclose(one, of_other, atol=1e-5)


def with_digit_in_state(cache: KVCache, digits: np.ndarray) -> KVCache:
    """The last token of the pairs writes to the first layer whether the first digit is large, and nothing decays."""
    writes = {name: part.clone() for name, part in cache.layers[0].items()}
    for name in ("key", "value", "decay", "step"):
        writes[name].zero_()
    slot = int(cache.ledger.in_segments([PAIRS])[0].nonzero()[-1])
    writes["key"][:, 0, slot, 0] = writes["step"][:, 0, slot] = 1.0
    writes["value"][:, 0, slot, 0] = torch.from_numpy(digits[:, 0] // 5).float()
    return replace(cache, layers=(writes, *cache.layers[1:]))


def test_a_state_that_stores_a_digit_is_read_and_lost_after_a_fold():
    texts = texts_for(HYBRID, count=200)
    planted = with_digit_in_state(caches(HYBRID, texts, LATER, [IN_VIEW])[IN_VIEW], texts.digits)
    labels = torch.from_numpy(texts.digits[:, :1].T.copy()) // 5

    def read(cache: KVCache) -> float:
        rows = read_layers(vectors(HYBRID, cache, STATE)[:1], labels, 2)
        return rows[rows["layer"] == 0]["right"].mean()

    assert read(planted) > 0.99
    assert read(planted.mask(PAIRS, layers=HYBRID.geometry.attending)) > 0.99
    assert read(planted.mask(PAIRS)) < 0.6


def test_wide_states_are_projected_head_by_head():
    state = torch.randn(2, 4, 64, 64, generator=torch.Generator().manual_seed(0))
    one, other = (narrowed(some) for some in (state, state.clone().index_fill_(1, torch.tensor([3]), 0.0)))
    assert one.flatten(1).shape[1] == WIDEST
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert not other[:, 3].any()
    lengths = (one.norm(dim=2) / state.flatten(2).norm(dim=2)).flatten()
    assert ((lengths - 1).abs() < 0.15).all()
    torch.testing.assert_close(narrowed(state[:, :, :8, :8]), state[:, :, :8, :8].flatten(2))


def test_a_model_with_attention_alone_is_read_by_itself():
    tables = read_model(small("attention"), replace(SMALL, distances=(8,))).assign(
        model="a", kind="a", memory="attention"
    )
    findings = findings_of({name: tables[tables["table"] == name] for name in (ANSWERS, PROBES, REACH)}, SMALL)
    assert {"answered", "read", "held"} <= set(findings.names)
    assert not {"ghost", "leak"} & set(findings.names)


def test_attention_and_states_in_one_layer_are_refused():
    refused(
        lambda: refuse_joined(load(tiny("falcon_h1"), tokenizer=HYBRID.tokenizer)), "in one layer", "attention alone"
    )


@pytest.fixture(scope="module")
def finished(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("toy") / "toy"
    of_mementos = toy(OF_MEMENTOS)
    of_mementos.lanes.plain.save_pretrained(folder)
    of_mementos.tokenizer.save_pretrained(folder)
    # No tiny model of random weights understands the question.
    return whole_run(STUDY, replace(SMALL, toys=(str(folder),)), HYBRID, root, [True, True, False])


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert set(findings.values("answered", "arm")) == set(arms_of(HYBRID))
    assert {*findings.values("mementos", "arm")} == set(ARMS)
    assert findings.values("of_block", "turn") == [*range(1, BLOCKS + 1)]


def test_a_toy_is_read_turn_by_turn_as_it_was_trained_and_a_restart_knows_no_mistake():
    model, recipe = load("memento-hybrid-0"), Memento(memory="hybrid", blocks=BLOCKS)
    rng = np.random.default_rng(0)
    drawn = [draw_changed(rng, 1, blocks=BLOCKS) for _ in range(40)]
    traces, wrong = [trace for trace, _ in drawn], [changed["sum"] for _, changed in drawn]
    rows = pd.concat(read_mementos(model, traces, wrong, 0))
    read = rows.set_index(["outcome", "arm", "turn", "text"])["value"].unstack("turn")
    right = recipe.right(model.lanes.plain, traces)
    np.testing.assert_array_equal(read.loc[RIGHT, ERASED], right)
    assert right.double().mean() > 0.9
    # The mistake by hand, in one pass under the view of the training.
    batches = [recipe.batch(some) for some in (traces, wrong)]
    mistaken = batches[0].ids.clone()
    block = model.tokens(traces[0].conversation())[0].span("block 1")
    mistaken[:, block] = batches[1].ids[:, block]
    counts = batches[0].counts[0]

    def margins(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output: Any = model.lanes.plain(**replace(batches[0], ids=ids).inputs, use_cache=False)
        scores = output.logits[:, counts[1:]].double().log_softmax(2)
        own, other = (batch.ids[:, counts, None] for batch in batches)
        return (scores.gather(2, own) - scores.gather(2, other)).reshape(len(traces), BLOCKS, 3)

    differs = (batches[0].ids != batches[1].ids)[:, counts].reshape(len(traces), BLOCKS, 3)
    first = differs.int().argmax(2, keepdim=True)
    by_hand = (margins(batches[0].ids) - margins(mistaken)).gather(2, first)[..., 0]
    np.testing.assert_allclose(read.loc[SHIFT, ERASED].drop(columns=1), by_hand[:, 1:], atol=1e-4)
    assert (by_hand[:, 1:].abs() > 1e-3).any()
    assert not read.loc[SHIFT, RESTART].drop(columns=1).to_numpy().any()
    assert (read.loc[SHIFT, BOTH] != read.loc[SHIFT, ERASED]).any(axis=None)


def test_models_of_other_texts_are_refused_as_toys():
    refused(lambda: read_toy(HYBRID, SMALL), "no model of mementos", "'toys'")
    refused(lambda: Config(others=("recall-hybrid-0",)), "the model itself")


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_a_language_model_is_asked_in_words(kind: str, smol_tokenizer: Any):
    """By the families of the presets, with random weights and the tokenizer of SmolLM2."""
    model = load(tiny(kind, vocab_size=len(smol_tokenizer)), tokenizer=smol_tokenizer)
    texts = texts_for(model, 8, 3)
    said = model.tokenizer.decode(texts.own[0].ids)
    assert "Keep these in mind: a=" in said
    assert said.endswith("=")
    assert "Keep" not in model.tokenizer.decode(texts.without[0].ids)
    for arm, cache in caches(model, texts, AT_ONCE, [TIMELESS, RESTART]).items():
        (row, *_) = texts.rows(arm)
        assert int(cache.ledger.following[0]) == row.positions[row.span(QUESTION).start]
        assert answers(model, texts, cache, arm).notna().all(axis=None)
    for part in parts_of(model, TIMELESS):
        assert max(moved(model, texts, AT_ONCE, TIMELESS, part)) == 0.0


# ---- what is concluded

Number = Callable[[np.ndarray], np.ndarray]
MODELS = (("hybrid", f"{RULES['step']} and attention"), ("alone", "attention"))


def flat(value: float) -> Number:
    return lambda texts: np.full(len(texts), value) + 0.02 * (-1.0) ** texts


def made_up(
    varies: float = 0.0, floor: float = 0.1, seen: float = 0.99, models: Any = MODELS, **levels: Number
) -> dict[str, pd.DataFrame]:
    """By default the states of the hybrid hold the turn, and are used."""
    texts = np.arange(24)
    drawn = {
        "ghost": flat(0.4),
        "leak": flat(0.5),
        "learned": flat(0.3),
        "follows": flat(0.6),
        "rivals": flat(0.0),
        "time": flat(0.0),
        "carried_by_writes": flat(0.2),
        "carried_by_slots": flat(0.2),
        "poison": flat(1.0),
        "cure": flat(0.8),
    } | levels
    value = {name: number(texts) for name, number in drawn.items()}
    answered, probes, heads, reach, turns = [], [], [], [], []
    for name, memory in models:
        recurs = "delta" in memory
        keys = {"model": name, "kind": name, "memory": memory, "text": texts}
        arms = {ERASED: 0.1 + recurs * value["ghost"], BOTH: 0.1, TIMELESS: 0.1, IN_VIEW: seen, RESTART: 0.1}
        arms |= {OF_STAND_IN: 0.1, RIVALS: 0.1} if recurs else {}
        follows = {OF_STAND_IN: value["follows"], RIVALS: value["rivals"]}
        states = (STATE, WRITTEN) if recurs else ()
        for (pairs, distance), (arm, right), when in product(((8, 8), (8, 16), (4, 8)), arms.items(), (AT_ONCE, LATER)):
            design = {**keys, "pairs": pairs, "distance": distance, "when": when, "arm": arm}
            answered.append({**design, "right": right, "follows": follows.get(arm, 0.0) + 0 * texts, "margin": 1.0})
            parts = (*OWN_SLOTS,) if arm == IN_VIEW else (*states, LATER_V)
            if arm not in (IN_VIEW, ERASED, TIMELESS, BOTH, RESTART):
                continue
            for part, reader in product(parts, (LINEAR, MLP, *([UNTRAINED] if arm == ERASED else []))):
                extra = {
                    (STATE, ERASED, LATER): value["leak"] - (reader == UNTRAINED) * value["learned"],
                    (STATE, BOTH, AT_ONCE): value["time"],
                    (WRITTEN, TIMELESS, LATER): value["carried_by_writes"],
                    (LATER_V, TIMELESS, LATER): value["carried_by_slots"],
                }.get((part, arm, when), 0 * texts)
                level = flat(floor if arm == RESTART else 0.1)(texts) + extra
                bits = pairs * (level - 0.1) * (8 / distance)
                row = {**design, "part": part, "reader": reader, "bytes": 64, "right": level, "bits": bits}
                probes += [{**row, "layer": layer} for layer in (-1, 0)]
        if recurs:
            heads.append({**keys, "pairs": 8, "distance": 8, "layer": 0, "head": 0, "right": 0.5, "bits": 1.0})
        reach.append({**keys, "varies": varies})
        for arm, turn in product(ARMS, range(1, BLOCKS + 1)):
            shift = value["poison"] - value["cure"] * (arm == BOTH)
            outcomes = {RIGHT: 0.9, SHIFT: shift, READ: 0.3}
            turns += [{**keys, "arm": arm, "turn": turn, "outcome": kind, "value": of} for kind, of in outcomes.items()]
    named = {ANSWERS: answered, PROBES: probes, HEADS: heads, REACH: reach, TURNS: turns}
    return {name: pd.concat(map(pd.DataFrame, rows), ignore_index=True) for name, rows in named.items()}


SETTINGS = Config(model="hybrid", others=("alone",), distances=(8, 16), capacities=(4, 8))


def concluded(**numbers: Any) -> Conclusion:
    return conclude(made_up(**numbers), SETTINGS, HYBRID)


def example() -> tuple[Config, Conclusion]:
    return SETTINGS, concluded()


def noise(rng: np.random.Generator) -> Conclusion:
    """Nothing is held, used or carried."""

    def normal(mean: float) -> Number:
        return lambda texts: rng.normal(mean, 0.05, len(texts))

    names = ("ghost", "leak", "learned", "rivals", "time", "carried_by_writes", "carried_by_slots", "poison", "cure")
    quiet = {name: normal(0.0) for name in names}
    return conclude(made_up(models=MODELS[:1], follows=normal(0.1), **quiet), SETTINGS, HYBRID)


def only(findings: Findings, name: str, **keys: Any) -> Estimate:
    (finding,) = findings.where(name, **keys)
    return finding.value


def test_planted_numbers_are_found():
    findings = concluded().findings
    keys = {"model": "hybrid"}
    assert only(findings, "ghost", **keys).mean == pytest.approx(0.4)
    assert only(findings, "leak", **keys).mean == pytest.approx(0.5)
    assert only(findings, "learned", **keys).mean == pytest.approx(0.3)
    assert [finding.keys["model"] for finding in findings.where("ghost")] == ["hybrid"], "the other has no states"
    assert only(findings, "kept", distance=16, **keys).mean == pytest.approx(0.5)
    assert only(findings, "held", part=STATE, bytes=64, **keys).mean == pytest.approx(4.0, abs=0.01)
    for reader, share in ((ANSWERING, 0.5), (SEEING, 0.99), (UNTRAINED, 0.3)):
        assert only(findings, "by_pairs", reader=reader, pairs=4, kind="hybrid").mean == pytest.approx(share)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, ("answers more questions because", "can be read from its states", "go by the states of the stand-in")),
        ({}, ("from what later words wrote in view", "how far a state decayed", "those of an untrained model")),
        (
            {"ghost": flat(0.0), "leak": flat(0.0), "follows": flat(0.1)},
            (
                "no effect of what its states",
                "nothing of the hidden turn was detected",
                "do not detectably go by the state",
            ),
        ),
        ({"rivals": flat(0.5), "time": flat(0.3)}, ("even with the turn in view", "can be read from how far")),
    ],
)
def test_the_answer_follows_the_intervals(numbers: dict[str, Number], expected: tuple[str, ...], tmp_path: Path):
    said = answer_of(STUDY, SETTINGS, concluded(**numbers), tmp_path).lower()
    assert [phrase for phrase in expected if phrase not in said] == []


def test_how_long_half_of_it_lasts_is_bracketed():
    assert lasting(concluded().findings, "hybrid", [8, 16]) == "beyond 8 words", (
        "16 words keep half, not detectably less"
    )
    assert lasting(concluded(leak=flat(0.0)).findings, "hybrid", [8, 16]) == ""


def test_controls_fail_where_something_cannot_be():
    assert [control.holds for control in concluded().controls] == [True, True, True]
    bad = concluded(varies=0.1, floor=0.3, seen=0.5)
    assert [control.holds for control in bad.controls] == [False, False, False]
