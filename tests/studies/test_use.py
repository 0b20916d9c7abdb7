"""The use study on a tiny model: what is edited is what its name says, and the sentences follow the numbers."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.use.study as study
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.probing.gram import one_hot_answers
from kvprobe.studies.use import collect as collecting
from kvprobe.studies.use.check import ANEW, INTACT, SAME
from kvprobe.studies.use.collect import cases_of, chosen_places, collect_effects, fit_halves
from kvprobe.studies.use.config import Config
from kvprobe.studies.use.effects import BOTH, ERASE, FULL, IN_VIEW, STRENGTHS, VIEWS, edited, stage
from kvprobe.studies.use.figures import SITES
from kvprobe.studies.use.fit import DIGITS, LEACE, RANDOM, features, labels
from kvprobe.studies.use.read import PARTS, PLACES, Layout, read_turn
from kvprobe.studies.use.sentences import answer_probes, answer_swap, answer_use, controls, dose_sentence
from kvprobe.tasks.passcode import conversation
from tests.refusals import refused
from tests.studies.runs import about, assert_figures, give, interrupted, short_contexts

SMALL = Config(contexts=8, codes=12, bands=2, randoms=2, batch=5)
CONTEXTS = short_contexts(8, longer="so ")


def use_short_conversations(patch: pytest.MonkeyPatch, model: Model) -> None:
    give(patch, model)
    patch.setattr(collecting, "contexts", lambda: CONTEXTS)


@pytest.fixture(scope="module")
def finished(roomy: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        use_short_conversations(patch, roomy)
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def cases(roomy: Model) -> list[collecting.Case]:
    with pytest.MonkeyPatch.context() as patch:
        use_short_conversations(patch, roomy)
        return cases_of(SMALL, roomy.tokenizer)


@pytest.fixture(scope="module")
def reads(roomy: Model, cases: list[collecting.Case]) -> list[dict[str, torch.Tensor]]:
    return [read_turn(roomy, case.context, case.codes, SMALL.batch) for case in cases]


def test_no_code_serves_twice_and_a_pair_differs_in_its_first_digit(cases: list[collecting.Case]):
    fitted = [code for case in cases for code in case.codes]
    owns = [case.pair[0] for case in cases]
    assert len(set(fitted + owns)) == len(fitted) + len(owns)
    assert all(case.pair[0][0] != case.pair[1][0] and case.pair[1] not in fitted for case in cases)


def test_what_is_read_is_what_each_code_leaves_less_their_average(
    roomy: Model, cases: list[collecting.Case], reads: list[dict[str, torch.Tensor]]
):
    case, read = cases[1], reads[1]
    rows = [conversation(case.context, code).tokens(roomy.tokenizer) for code in case.codes]
    layout = Layout.of(rows[0])
    values = torch.stack([roomy.prefill(row[: layout.stop]).values[2][0].transpose(0, 1).flatten(1) for row in rows])
    average = values.mean(0)
    torch.testing.assert_close(read["average.V"][2], average[layout.start : layout.stop], atol=1e-5, rtol=1e-4)
    slots = list(layout.places["summary"])
    own = (values - average)[:, slots]
    torch.testing.assert_close(read["summary.V"][2], own.mean(1), atol=1e-5, rtol=1e-3)
    gram = sum(each.T @ each for each in own.transpose(0, 1)) / len(slots)
    torch.testing.assert_close(read["summary.gram.V"][2], gram, atol=1e-4, rtol=1e-3)
    digit = layout.places["code"][3]
    torch.testing.assert_close(read["code.V"][2, :, 3], (values - average)[:, digit], atol=1e-5, rtol=1e-3)
    text = roomy.tokenizer.decode([rows[4].ids[slot] for slot in layout.places["code"]])
    assert text == case.codes[4] == "".join(map(str, read["digits"][:, 4].tolist()))


def test_an_eraser_fitted_on_slots_guards_their_mean(reads: list[dict[str, torch.Tensor]]):
    first, _ = fit_halves(reads, SMALL)
    half = reads[0::2]
    answers = one_hot_answers(labels(half, None), DIGITS, torch.float64)
    for part in PARTS:
        own = features(half, "after", None, part)
        left = own - first["after", None, part, LEACE].inside(own)
        # Above the first layer, whose K and V of a slot know nothing of another's token.
        before, after = (each[1:].double().mT @ (answers - answers.mean(0)) for each in (own, left))
        assert after.abs().max() < 1e-3 * before.abs().max()


def test_an_edit_in_full_holds_the_source_in_its_place_and_nothing_of_it_elsewhere(
    roomy: Model, cases: list[collecting.Case], reads: list[dict[str, torch.Tensor]]
):
    erasers, case = fit_halves(reads, SMALL)[1], cases[0]
    scene = stage(roomy, case.context, case.pair, reads[0], case.codes)
    layers = range(roomy.geometry.n_layers)
    for place in PLACES:
        slots = list(scene.layout.places[place])
        others = [slot for slot in range(scene.base.slots) if slot not in slots]
        full, along = (edited(scene, scene.donor, erasers, place, name, layers) for name in (FULL, LEACE))
        torch.testing.assert_close(full.values[2][:, :, slots], scene.donor.values[2][:, :, slots])
        for cache in (full, along):
            assert torch.equal(cache.keys[2][:, :, others], scene.base.keys[2][:, :, others])
        assert not torch.equal(along.keys[2][:, :, slots], scene.base.keys[2][:, :, slots])
    only = edited(scene, scene.donor, erasers, "code", LEACE, [1])
    assert torch.equal(only.values[2], scene.base.values[2])
    assert not torch.equal(only.values[1], scene.base.values[1])


def test_a_run_holds_every_table_and_figure_and_its_controls(finished: Run):
    metrics = finished.metrics
    assert all(holds for _, holds in controls(metrics))
    samples = finished.df()
    bands = SMALL.bands + 1
    assert samples["context"].nunique() == SMALL.contexts
    assert set(samples["view"]) == set(VIEWS)
    assert len(metrics["erased"]) == len(SITES) * bands * 3
    assert len(metrics["swapped"]) == len(SITES) * 3
    assert len(finished.df("doses")) == SMALL.contexts * len(STRENGTHS) * 2 * 3
    assert_figures(finished, "read_and_used", "by_band", "doses", "probes")
    assert finished.df("replies")["erased"].nunique() == 1 + 2 * 3
    json.dumps(finished.report)


def test_no_strength_is_no_edit_and_all_of_it_is_that_of_the_sweep(finished: Run):
    doses = finished.df("doses")
    none = doses[doses["strength"] == 0]
    assert (none["margin"] - none["intact_margin"]).abs().max() < 1e-3
    keys = ["context", "view", "place", "band", "part", "kind", "name"]
    both = doses[doses["strength"] == 1].merge(finished.df(), on=keys, suffixes=("", "_swept"))
    assert len(both)
    assert (both["margin"] - both["margin_swept"]).abs().max() < 1e-3


def test_a_probe_of_intact_features_reads_and_that_of_erased_ones_does_not(finished: Run):
    table = finished.df("probes")
    # At the first layer V of a code slot is its digit, whatever the conversation.
    first = table[(table["place"] == "code") & (table["part"] == "V") & (table["layer"] == 0)]
    means = first.groupby(["probe", "state"])["accuracy"].mean()
    for probe in (SAME, ANEW):
        assert means[probe, INTACT] > 0.6
        assert means[probe, LEACE] < 0.3


def test_interrupted_edits_go_on_where_they_stopped_with_the_same_numbers(
    finished: Run,
    roomy: Model,
    cases: list[collecting.Case],
    reads: list[dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    collect = partial(collect_effects, roomy, cases, reads, fit_halves(reads, SMALL), SMALL, Run(tmp_path))
    table, calls = interrupted(collect, monkeypatch, collecting, "measure", at=8)
    # Two conversations were whole; of the third one view was measured twice, and another begun.
    assert len(calls) == SMALL.contexts * len(VIEWS) + 2
    pd.testing.assert_frame_equal(table, finished.df())


def test_the_place_of_a_half_is_chosen_on_the_other():
    rows = []
    for half in (0, 1):
        for band in ("0–1", "2–3"):
            for name, lost in ((LEACE, 5.0 if (half == 0) == (band == "0–1") else 1.0), (f"{RANDOM} 0", 0.5)):
                row = {"kind": ERASE, "view": IN_VIEW, "place": "code", "band": band, "part": "V", "name": name}
                rows.append(row | {"half": half, "intact_margin": 9.0, "margin": 9.0 - lost})
    places = chosen_places(pd.DataFrame(rows))
    assert places == ((IN_VIEW, "code", "2–3", "V"), (IN_VIEW, "code", "0–1", "V"))


def metrics_with(
    code: float = 20.0, after: float = 0.0, masked: float = 0.0, way: bool = True, same: float = 0.1, anew: float = 0.1
) -> dict[str, Any]:
    lost = {"code": code, "after": after, "summary": masked}
    site = {"part": BOTH, "band": EVERY_LAYER}
    erased = [
        {"view": view, "place": place, **site, "claim": about(lost[place]), "lost": {FULL: about(lost[place] + 1)}}
        for view, place in SITES
    ]
    share = {LEACE: about(0.9), RANDOM: about(0.1), FULL: about(1.0)}
    probes = [
        {"place": place, "part": "V", "probe": probe, "state": state, "accuracy": about(value)}
        for place in PLACES
        for probe, after in ((SAME, same), (ANEW, anew))
        for state, value in ((INTACT, 0.8), (LEACE, after))
    ]
    return {
        "chance": 0.1,
        "scale": {IN_VIEW: {"margin": about(24.0)}},
        "erased": erased,
        "swapped": [{"view": IN_VIEW, "place": "code", **site, "share": share if way else None}],
        "probes": probes,
    }


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "The model uses what the probe reads in the code's own slots [+20.00"),
        ({}, "No use was detected of what the probe reads in its turn after it [+0.00"),
        ({"after": 0.5}, "a trace (below 5% of the margin) of what the probe reads in its turn after it"),
        (
            {"masked": 3.0},
            "the code's own slots [+20.00 (+19.90 to +20.10); whole vectors +21.00 (+20.90 to +21.10)]; the summary",
        ),
        ({"code": -3.0}, "No use was detected of what the probe reads in the code's own slots"),
    ],
)
def test_the_sentence_on_use_follows_the_intervals(settings: dict[str, float], said: str):
    assert said in answer_use(metrics_with(**settings))


def test_the_sentence_on_exchange_needs_a_way_to_go():
    assert "turns the answer 90.0 % (80.0 to 100.0) of the way" in answer_swap(metrics_with())
    assert "no way for an exchange to go" in answer_swap(metrics_with(way=False))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "and a probe trained anew reads no more"),
        ({"anew": 0.5}, "a probe trained anew on what is left still reads 50%, 50%, 50%"),
        ({"same": 0.4}, "The erasure did not take all that the probe reads"),
    ],
)
def test_the_sentence_on_probes_follows_their_accuracy(settings: dict[str, float], said: str):
    assert said in answer_probes(metrics_with(**settings))


@pytest.mark.parametrize(("bend", "said"), [(1.0, "half of it takes 50%"), (-1.0, "does not always take more")])
def test_the_sentence_on_doses_follows_the_line(bend: float, said: str):
    line = {0.0: 0.0, 0.25: 2.5, 0.5: 5.0, 0.75: 5.0 + 2.5 * bend, 1.0: 10.0, 1.5: 12.0, 2.0: 13.0}
    doses = [
        {"kind": ERASE, "name": LEACE, "strength": strength, "value": about(line[strength])} for strength in STRENGTHS
    ]
    assert said in dose_sentence({"doses": doses})


def test_digits_that_share_a_token_are_refused(roomy: Model):
    refused(lambda: read_turn(roomy, CONTEXTS[0], ["48213", "482135"], batch=2), "tokenises digits apart")


def test_the_seed_decides_the_random_subspaces(reads: list[dict[str, torch.Tensor]]):
    one, same, other = (
        fit_halves(reads, dataclasses.replace(SMALL, seed=seed))[0]["after", None, "K", f"{RANDOM} 0"].read
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not np.allclose(one, other)
