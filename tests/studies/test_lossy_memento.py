"""The lossy_memento study: a hand-made slot that stores a digit, whole runs on a tiny model, made-up tables."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model, load
from kvprobe.report.findings import Findings
from kvprobe.stats import Estimate
from kvprobe.studies import lossy_memento
from kvprobe.studies.layer_readers import LINEAR, MLP
from kvprobe.studies.lossy_memento import Config
from kvprobe.studies.lossy_memento.collect import (
    ANSWERS,
    LAYERS,
    MODEL,
    PROBES,
    REACH,
    WHOLE,
    probe,
    read_model,
)
from kvprobe.studies.lossy_memento.conclude import conclude, findings_of
from kvprobe.studies.lossy_memento.reading import OMITTED, RESTART, RETAINED, STAND_IN, STATED, SWAPPED
from kvprobe.studies.lossy_memento.study import STUDY
from kvprobe.tasks.lossy_mementos import BITS, LossyDesign
from kvprobe.training.lossy import NUMBER, Lossy
from tests.experiments.made_up import answer_of
from tests.refusals import refused
from tests.studies.runs import whole_run
from tests.toy import toy

SMALL = Config(model="main", others=None, traces=80, batch=40)
TINY = Lossy(design=LossyDesign(3, 2), layers=3, width=16, heads=2, inner=24, tested=4)


def stores_the_digit() -> Model:
    """A block of one digit: attention is uniform, the first layer copies the digit into the sign of the memento, the
    second from there into the question, and the answer is read off."""
    recipe = Lossy(design=LossyDesign(1, 1), layers=2, width=64, heads=1, inner=4)
    plain: Any = recipe.model()
    for parameter in plain.parameters():
        parameter.data.zero_() if parameter.ndim == 2 else parameter.data.fill_(1.0)
    digits = torch.arange(10)
    plain.model.embed_tokens.weight.data[:, 63] = 1.0
    plain.model.embed_tokens.weight.data[NUMBER["0"] + digits, digits] = 8.0
    for number, layer in enumerate(plain.model.layers):
        layer.self_attn.v_proj.weight.data[digits, 10 * number + digits] = 1.0
        layer.self_attn.o_proj.weight.data[10 * (number + 1) + digits, digits] = 8.0
    plain.lm_head.weight.data[NUMBER["0"] + digits, 20 + digits] = 9.0
    return load(plain, tokenizer=recipe.tokenizer())


def test_a_slot_that_stores_the_digit_is_read_and_used_in_full():
    config = Config(others=None, traces=400, batch=400)
    findings = findings_of(tables_of(read_model(stores_the_digit(), config, config.model)))
    answered = {arm: only(findings, "answered", arm=arm, kind=OMITTED).mean for arm in (RETAINED, RESTART, STAND_IN)}
    assert answered == {RETAINED: 1.0, RESTART: pytest.approx(0.1, abs=0.05), STAND_IN: 0.0}
    assert only(findings, "follows").mean == 1.0
    assert [only(findings, "taken", arm=arm).mean for arm in SWAPPED] == [0.0, 1.0], "it goes through V alone"
    for reader in (LINEAR, WHOLE, MLP):
        assert only(findings, "read", reader=reader, arm=RETAINED).mean == 1.0
        assert only(findings, "read", reader=reader, arm=RESTART).mean < 0.2
        assert 0.98 * BITS < only(findings, "held", reader=reader).mean <= BITS
    assert only(findings, "held", reader=MODEL).mean == pytest.approx(BITS, abs=0.05)


def only(findings: Findings, name: str, **keys: Any) -> Estimate:
    """The one finding that has these keys, whatever its others."""
    (finding,) = findings.where(name, **keys)
    return finding.value


def tables_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {name: rows[rows["table"] == name] for name in (ANSWERS, PROBES, LAYERS)}


def test_probes_know_all_of_a_planted_code_and_nothing_of_noise():
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(10, size=(2, 1200)))
    planted = torch.nn.functional.one_hot(labels, 10).float().transpose(0, 1).flatten(1)
    noise = torch.from_numpy(rng.normal(size=(2, *planted.shape))).float()
    read = probe(torch.stack([noise[0], planted + 0.01 * noise[1]]), labels, RETAINED, SMALL, rng)
    known = read.groupby(["table", "reader", "layer"], dropna=False)["bits"].mean()
    assert known[LAYERS].min() == pytest.approx(0, abs=0.15)
    assert (known[PROBES] > 1.9 * BITS).all()
    assert known.max() <= 2 * BITS


def test_what_is_spread_over_layers_is_read_in_all_of_them_alone():
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(10, size=(2, 1200)))
    apart = torch.nn.functional.one_hot(labels, 10).float()  # a digit in each layer
    read = probe(apart + 0.01 * torch.from_numpy(rng.normal(size=apart.shape)).float(), labels, RETAINED, SMALL, rng)
    known = read[read["table"] == PROBES].groupby("reader")["bits"].mean()
    assert known[LINEAR] == pytest.approx(BITS, abs=0.15)
    assert 1.9 * BITS < known[WHOLE] <= 2 * BITS


@pytest.fixture(scope="module")
def finished(root: Path) -> Run:
    # No tiny model of random weights understands the question.
    return whole_run(STUDY, SMALL, toy(TINY), root, [True, True, False])


def test_a_run_shows_everything(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    assert {claim.finding for claim in STUDY.claims} <= set(findings.names)
    assert set(findings.values("answered", "arm")) == {RETAINED, RESTART, STAND_IN, *SWAPPED}
    assert only(findings, "held", reader=LINEAR).mean <= 3 * BITS


def test_two_models_of_one_training_are_refused(tmp_path: Path):
    model = toy(TINY)
    model.lanes.plain.save_pretrained(tmp_path / "same")
    model.tokenizer.save_pretrained(tmp_path / "same")
    config = replace(SMALL, others=(str(tmp_path / "same"),))
    refused(lambda: lossy_memento.run(config, tmp_path, model=model), "same design, training and seed")


def test_other_models_are_refused():
    from tests.studies.test_memento_toy import MODEL as other

    refused(lambda: read_model(other, SMALL, SMALL.model), "no model of lossy mementos", "`kvprobe train lossy`")
    refused(lambda: Config(others=("lossy-8-3-retained-0",)), "the model itself")


def test_a_title_says_how_many_models_are_read_beside_the_first():
    assert (SMALL.and_more, Config().and_more) == ("", " and 5 more")


Number = Callable[[np.ndarray], np.ndarray]
PAIR = (("retained", 8, 3, 0), ("recomputed", 8, 3, 0))


def flat(value: float) -> Number:
    return lambda traces: np.full(len(traces), value) + 0.02 * (-1.0) ** traces


def made_up(
    models: tuple[tuple[str, int, int, int], ...] = PAIR,
    varies: float = 1e-7,
    stated: float = 1.0,
    again: float = 0.0,
    **levels: Number,
) -> dict[str, pd.DataFrame]:
    """By default the one that was trained to go on holds and uses all; the other nothing."""
    traces = np.arange(24)
    answers, probes, layers, reach = [], [], [], []
    for provenance, asked, slots, seed in models:
        keys = {"provenance": provenance, "asked": asked, "slots": slots, "seed": seed, "trace": traces}
        knows = provenance == "retained"
        drawn = {
            "gain": flat(0.85 if knows else 0.0),
            "follows": flat(0.9 if knows else 0.1),
            "left": flat(0.02 if knows else 0.1),
            "harm": flat(0.0),
            "leak": flat(0.8 if knows else 0.0),
            "full": flat(0.95 if knows else 0.0),
        } | levels
        value = {name: number(traces) for name, number in drawn.items()}
        for kind, arm in product((OMITTED, STATED), (RETAINED, RESTART, STAND_IN, *SWAPPED)):
            right = 0.1 + value["gain"] * (arm == RETAINED) if kind == OMITTED else stated + 0 * value["harm"]
            right = value["left"] if (kind, arm) == (OMITTED, STAND_IN) else right
            right = right + value["harm"] if (kind, arm) == (STATED, RESTART) else right
            follows = value["follows"] if arm == STAND_IN else 0.1
            bits = asked * BITS * (value["full"] if arm == RETAINED else again)
            answers.append(
                {**keys, "kind": kind, "arm": arm, "right": right, "follows": follows, "bits": bits, "margin": 1}
            )
        for reader, arm in product((LINEAR, WHOLE, MLP), (RETAINED, RESTART)):
            right = 0.1 + value["leak"] * (arm == RETAINED)
            probes.append({**keys, "reader": reader, "arm": arm, "right": right, "bits": asked * BITS * (right - 0.1)})
            layers += [{**keys, "arm": arm, "layer": layer, "right": right, "bits": 0.0} for layer in range(2)]
        reach.append({**keys, "varies": varies})
    named = {ANSWERS: answers, PROBES: probes, LAYERS: layers, REACH: reach}
    return {name: pd.concat(map(pd.DataFrame, rows), ignore_index=True) for name, rows in named.items()}


WIDE = toy(Lossy(design=LossyDesign(8, 3), layers=2, width=16, heads=2, inner=24))


def concluded(**numbers: Any) -> Conclusion:
    return conclude(made_up(**numbers), Config(), WIDE)


def example() -> tuple[Config, Conclusion]:
    return Config(), concluded()


def noise(rng: np.random.Generator) -> Conclusion:
    """Nothing is held, used or harmed, and nine tenths are known."""

    def normal(mean: float) -> Number:
        return lambda traces: rng.normal(mean, 0.05, len(traces))

    quiet = {
        name: normal(mean) for name, mean in (("gain", 0), ("follows", 0.1), ("left", 0.1), ("harm", 0), ("leak", 0))
    }
    return conclude(made_up(PAIR[:1], stated=0.5, full=normal(0.9), **quiet), Config(), WIDE)


def test_planted_numbers_are_found():
    findings = concluded(models=(*PAIR, ("retained", 8, 3, 1))).findings
    keys = {"provenance": "retained", "asked": 8, "slots": 3}
    assert only(findings, "gain", seed=0, **keys).mean == pytest.approx(0.85)
    assert only(findings, "held", reader=MODEL, **keys).mean == pytest.approx(8 * BITS * 0.95)
    assert only(findings, "per_slot", reader=MODEL, **keys).mean == pytest.approx(8 * BITS * 0.95 / 3)
    assert only(findings, "full", **keys).mean == pytest.approx(0.95)
    assert only(findings, "leak", provenance="recomputed", seed=0).mean == pytest.approx(0.0)
    assert findings.values("by_seed", "seed", provenance="retained") == [0, 1]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, ("answers more questions for omitted digits", "hold omitted digits", "more than nine tenths of it")),
        ({}, ("go by the slots of the stand-in", "fewer of the block's own digits", "no cost of a restart")),
        ({"gain": flat(0.0), "leak": flat(0.0)}, ("no more questions for omitted digits", "hold nothing of omitted")),
        ({"follows": flat(0.1), "left": flat(0.5)}, ("do not detectably go by", "more of the block's own digits")),
        ({"harm": flat(-0.3), "full": flat(0.4)}, ("costs right answers about stated", "less than nine tenths")),
    ],
)
def test_the_answer_follows_the_intervals(numbers: dict[str, Number], expected: tuple[str, ...], tmp_path: Path):
    said = answer_of(STUDY, Config(), concluded(**numbers), tmp_path)
    assert [phrase for phrase in expected if phrase not in said] == []


def test_controls_fail_where_something_cannot_be():
    assert [control.holds for control in concluded().controls] == [True, True, True]
    bad = concluded(varies=0.1, again=0.01, stated=0.5)
    assert [control.holds for control in bad.controls] == [False, False, False]
