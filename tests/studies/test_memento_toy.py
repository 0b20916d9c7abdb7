"""The memento_toy study: whole runs on a tiny toy, what is read where, and numbers of made-up tables."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.studies import memento_toy
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.closing import BEYOND, ERASED, EVERYTHING, OPEN, RANDOM, STAND_IN, states_of
from kvprobe.studies.memento_toy.collect import CHECKPOINT, MAIN, SEED, UNTRAINED
from kvprobe.studies.memento_toy.conclude import conclude
from kvprobe.studies.memento_toy.digits import RESTART, RETAINED, sites_of
from kvprobe.studies.memento_toy.exchange import DONOR, OWN
from kvprobe.studies.memento_toy.probes import BOTH, LINEAR, MLP, PARTS
from kvprobe.studies.memento_toy.study import STUDY
from kvprobe.tasks.mementos import visible_accuracy
from tests.experiments.made_up import answer_of
from tests.refusals import refused
from tests.studies.runs import whole_run
from tests.toy import TINY, toy

SMALL = Config(blocks=4, block=2, traces=80, changed=8, closed=48, batch=40)
LAYERS, TRACES = 4, 24


@pytest.fixture(scope="module")
def finished(root: Path) -> Run:
    return whole_run(STUDY, SMALL, toy(), root, [True])


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert [set(findings.values(name, "model")) for name in ("by_layer", "by_training")] == [{MAIN, UNTRAINED}] * 2
    assert set(findings.values("left", "state")) == {OPEN, STAND_IN, *ERASED, RESTART}
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


def test_a_block_that_is_never_hidden_is_refused():
    refused(lambda: Config(block=10), "from block 11 on", "a trace has 10")
    refused(lambda: Config(block=8, keep=2), "from block 11 on where 2 stay in view")


def test_all_that_copies_do_not_say_is_everything():
    assert states_of(replace(SMALL, content="copy")) == [OPEN, STAND_IN, EVERYTHING, RANDOM, RESTART]


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
        names, everywhere = {"model": model, "role": role}, role != CHECKPOINT
        probes = [(BOTH, LINEAR), *((part, LINEAR) for part in PARTS), *[(BOTH, MLP)] * everywhere]
        sites = sites_of(LAYERS, config.block, config.blocks, config.keep, everywhere=everywhere)
        for site, (part, probe) in product(sites, probes):
            right = floor + (leak(traces) if site.arm == RETAINED and site.layer > 1 else 0.0)
            keys = {**names, **site._asdict(), "part": part, "probe": probe, "trace": traces}
            samples.append({**keys, "right": right, "alike": floor if probe == LINEAR else np.nan})
        for arm, memento in product((RETAINED, RESTART), range(1, config.blocks + 1)):
            right = 0.5 + (kept(traces) if arm == RETAINED else 0.0) - 0.1 * (role == CHECKPOINT)
            row = {**names, "arm": arm, "memento": memento, "trace": traces, "right": right}
            answers += [row] * (arm == RETAINED or memento >= config.hidden_from)
        reach += [{**names, "layer": layer, "varies": near if layer < 2 else 0.5} for layer in range(LAYERS)]
        parts = [(OWN, BOTH), (DONOR, BOTH), *product(("digits", "sum"), (*PARTS, BOTH))]
        for condition, part in parts if everywhere else ():
            margins = {OWN: 10.0, DONOR: -10.0, "digits": np.nan, "sum": 10.0 - 20.0 * way(traces)}
            row = {**names, "condition": condition, "part": part, "trace": traces, "margin": margins[condition]}
            changed.append({**row, "right": 0.9, "turned": used(traces) if condition == "digits" else 0.0, "kl": 0.01})
    for state in states_of(config):
        known, hurt = {"state": state, "trace": traces}, state in (STAND_IN, *ERASED)
        for memento in range(1, config.blocks + 1):
            right = 0.9 + (harm(traces) if hurt else 0.0)
            closing.append({**known, "measure": "answer", "memento": memento, "right": right})
        right = floor + (left(traces) if state != RESTART else 0.0)
        closing.append({**known, "measure": "probe", "alike": floor, "right": right})
        closing.append({"measure": "rank", "state": state, "layer": np.arange(LAYERS), "rank": 3.0})
    tables = {"samples": samples, "answers": answers, "changed": changed, "closing": closing}
    joined = {name: pd.concat(map(pd.DataFrame, rows), ignore_index=True) for name, rows in tables.items()}
    return joined | {"reach": pd.DataFrame(reach)}


MODEL = toy(replace(TINY, layers=LAYERS))


def concluded(**numbers: Any) -> Conclusion:
    return conclude(made_up(**numbers), SEEDED, MODEL)


def example() -> tuple[Config, Conclusion]:
    return SEEDED, concluded()


def noise(rng: np.random.Generator) -> Conclusion:
    """Nothing is there: neither arm nor exchange makes a difference."""

    def normal(size: float, mean: float = 0.0) -> Number:
        return lambda traces: rng.normal(mean, size, len(traces))

    bound = visible_accuracy("sum", 2, 3)
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
    assert findings.at("beyond_text", model=MAIN).mean == pytest.approx(0.34 - visible_accuracy("sum", 2, 3))
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
        ({}, ("hold hidden digits beyond what is in the text", "any reader of the text in view could know (16 %)")),
        ({}, ("the model goes by the text more than by the hidden block", "a restart costs right mementos")),
        ({}, ("nothing that was detected can be read, and no change in right mementos was detected",)),
        ({"leak": flat(0.0)}, ("hold nothing of hidden digits that was detected",)),
        ({"leak": flat(-0.1)}, ("which cannot be: doubt the run", "less than a perfect reader of the text in view")),
        ({"used": flat(0.01), "kept": flat(-0.3)}, ("about one memento in a hundred", "gives more right mementos")),
        ({"used": flat(0.5), "way": flat(0.9)}, ("more than one memento in a hundred", "the hidden block more than")),
        ({"harm": flat(-0.4), "left": flat(0.4)}, ("fewer mementos are right", "some of it can be read")),
    ],
)
def test_the_answer_follows_the_intervals(numbers: dict[str, Number], expected: tuple[str, ...], tmp_path: Path):
    said = answer_of(STUDY, SEEDED, concluded(**numbers), tmp_path)
    assert [phrase for phrase in expected if phrase not in said] == []


def test_the_control_fails_where_the_first_layers_know():
    assert [concluded(near=near).controls[0].holds for near in (1e-7, 1e-3)] == [True, False]


def test_the_paper_stands_beside_runs_of_its_design_alone():
    designs = [PLAIN, Config(keep=1), Config(content="copy"), Config(block=3)]
    concluded = [conclude(made_up(config, roles=ALL[:1]), config, MODEL) for config in designs]
    assert [bool(each.facts["published"]) for each in concluded] == [True, False, False, False]
    beside = [each.findings.frame("paper_by_distance") for each in concluded]
    assert [len(each) for each in beside[1:]] == [0, 0, 0]
    assert [len(each.findings.where("paper_by_training")) for each in concluded] == [2, 0, 0, 0]
    linear = beside[0][beside[0]["probe"] == "linear"]
    assert dict(zip(linear["distance"], linear["mean"], strict=True)) == {1: 0.262, 2: 0.214, 7: 0.13}
    first, last = concluded[0].findings.where("paper_by_layer", probe="linear")
    assert (first.keys["layer"], first.value.mean, last.keys["layer"], last.value.mean) == (0, 0.131, 3, 0.262)
