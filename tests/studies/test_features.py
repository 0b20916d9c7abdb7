"""The features study: a whole run on a tiny model, what it does on made-up numbers, and what is said of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.features.analyse as analysing
import kvprobe.studies.features.collect as collecting
import kvprobe.studies.features.prepare as preparing
import kvprobe.studies.features.study as study
from kvprobe.experiments.presets import presets
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.inference.model import Model
from kvprobe.probing.splits import SPLITS
from kvprobe.report.page import write_report
from kvprobe.saes import Dictionary
from kvprobe.studies.features.analyse import ARMS, PARTS, differing, fewest
from kvprobe.studies.features.collect import READERS, RESTARTED, exchange, read_context, restarted
from kvprobe.studies.features.config import Config
from kvprobe.studies.features.narrative import answer_differs, answer_tells, controls
from kvprobe.studies.features.prepare import hand_written
from kvprobe.tasks.passcode import contexts, conversation
from tests.models import llama
from tests.refusals import refused
from tests.saes.test_quality import identity
from tests.studies.runs import assert_figures, give, interrupted

SMALL = Config(places=("v.1",), width=12, active=3, written=3, length=10, tokens=2048, contexts=8, codes=3, folds=3)
CODES = ("48213", "90577", "13662")


@pytest.fixture(scope="module")
def tiny_with_words(smol: Model) -> Model:
    """A tiny random model that reads real conversations."""
    return llama(seed=1, tokenizer=smol.tokenizer, vocab_size=len(smol.tokenizer), initializer_range=0.4)


@pytest.fixture(autouse=True, scope="module")
def few_texts(tiny_with_words: Model) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, tiny_with_words)
        patch.setattr(preparing, "hand_written", lambda model: hand_written(model)[:4])
        patch.setattr(collecting, "SPLICED", 2)
        patch.setattr(analysing, "KS", (1,))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study.run(SMALL, tmp_path_factory.mktemp("runs"))


def test_a_run_holds_every_table_figure_and_dictionary_and_no_activations(finished: Run, tiny_with_words: Model):
    differences, curves, exchanges = (finished.df(name) for name in ("differences", "curves", "exchanges"))
    assert len(differences) == len(RESTARTED) * (16 + 2 * SMALL.width)
    assert len(curves) == len(ARMS) * len(SPLITS) * (2 * len(READERS) + len(PARTS))
    assert set(curves["k"]) == {1, SMALL.width, 16}
    assert ((curves["low"] <= curves["accuracy"]) & (curves["accuracy"] <= curves["high"])).all()
    assert exchanges.groupby(["place", "set"])["context"].nunique().eq(SMALL.contexts).all()
    assert_figures(finished, "differences", "densities", "exchange", "curves_v_1")
    assert not (finished.path / "shards").exists()
    kept = Dictionary.load(finished.path / "dictionaries" / "v.1", tiny_with_words)
    assert (kept.width, str(kept.place)) == (SMALL.width, "v.1")
    assert finished.metrics["untouched"]["v.1"] < 1e-4
    page = write_report(finished.path, finished.report).read_text()
    assert "Which latents differ" in page
    assert page.count('data-component="ColoredTokensMulti"') > 2


def test_an_interrupted_run_goes_on_with_the_same_numbers(
    finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    starts: list[None] = []

    def run() -> Run:
        if starts:  # the second start trains nothing again
            monkeypatch.setattr(preparing, "train", None)
            monkeypatch.setattr(study, "draw_all", lambda *_: None)
        starts.append(None)
        return study.run(SMALL, tmp_path)

    resumed, calls = interrupted(run, monkeypatch, collecting, "read_context", at=4)
    assert len(calls) == 4 + 5
    assert json.dumps(resumed.metrics) == json.dumps(finished.metrics)


def test_dictionaries_of_a_run_can_be_studied_again_but_only_one_of_a_place(
    finished: Run, tiny_with_words: Model, tmp_path: Path
):
    folder = finished.path / "dictionaries" / "v.1"
    config = dataclasses.replace(SMALL, dictionaries=(str(folder),))
    (loaded,), shards = preparing.prepare(tiny_with_words, config, Run(tmp_path))
    assert loaded.place in shards.places
    refused(
        lambda: preparing.prepare(
            tiny_with_words, dataclasses.replace(config, dictionaries=(str(folder), f"{folder}/")), Run(tmp_path)
        ),
        "Two dictionaries read v.1",
    )


def test_each_arm_is_what_reading_the_conversation_by_itself_gives(tiny_with_words: Model):
    model, context = tiny_with_words, contexts()[0]
    features = Dictionary(identity(32), preparing.Place("resid_post", 1))
    found = read_context(model, context, CODES, {"resid_post.1": (features, features.rotated(0))})
    tokens = conversation(context, CODES[1]).tokens(model.tokenizer)
    third, answer = tokens.span("T3").start, tokens.part("answer").start
    first = model.capture(tokens[:third], ["resid_post"], layers=[1], keep_cache=True)
    assert first.cache is not None
    masked = model.capture(tokens[third:answer], ["resid_post"], layers=[1], past=first.cache.mask("T1", "T2"))
    before = first["resid_post", 1][0]
    alone = restarted(model, context, CODES[2])
    restart = model.capture(alone, ["resid_post"], layers=[1])["resid_post", 1][0]
    expected = {
        "hidden": before[tokens.part("code").stop : tokens.span("summary2").start],
        "summary2": before[tokens.span("summary2")],
        "T3": masked["resid_post", 1][0],
        "restart T3": restart[alone.span("T3").start :],
        "restart summary2": restart[alone.span("summary2")],
    }
    for arm, slots in expected.items():
        row = 1 if len(found[f"resid_post.1.{arm}.raw"]) > 1 else 0
        torch.testing.assert_close(found[f"resid_post.1.{arm}.raw"][row], slots.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            found[f"resid_post.1.{arm}.latents"][row], features.encode(slots).mean(0), rtol=1e-4, atol=1e-5
        )


def test_all_latents_of_a_perfect_dictionary_are_the_whole_activation_and_none_are_nothing(tiny_with_words: Model):
    # Below layer 2 the values of T3 cannot have seen the hidden turns, and there is nothing to exchange.
    features = Dictionary(identity(16), preparing.Place("v", 2))
    sets = {"v.2": {"all": range(32), "none": []}}
    found = exchange(tiny_with_words, [features], contexts()[3], CODES[0], sets).set_index("set")["kl"]
    assert found["all"] == pytest.approx(found["whole"], rel=1e-3)
    assert found["none"] == pytest.approx(found["retained"], rel=1e-6)
    assert abs(found["whole"] - found["retained"]) > 1e-4


def test_after_the_last_layer_the_whole_exchange_is_the_restart_itself(tiny_with_words: Model):
    features = Dictionary(identity(32), preparing.Place("resid_post", 2))
    found = exchange(tiny_with_words, [features], contexts()[3], CODES[0], {"resid_post.2": {}}).set_index("set")["kl"]
    assert found["retained"] > 1e-3
    assert found["whole"] < 1e-5


def test_a_planted_difference_is_found_and_noise_is_not():
    rng = np.random.default_rng(0)
    restart = rng.random((40, 60))
    retained = restart + rng.normal(0, 0.1, (40, 60))
    retained[:, 7] += 0.2
    retained[:, 9] -= 0.2
    restart[:, 11] = retained[:, 11] = 0
    table = differing(retained, restart, 0)
    assert table.loc[table["p_family"] <= 0.05, "latent"].tolist() == [7, 9]
    assert table.loc[11, "p_family"] == 1
    assert table.loc[7, "low"] > 0 > table.loc[9, "high"]


def test_under_the_null_the_family_is_wrong_one_time_in_twenty():
    found = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        # Columns that go together, as latents do, of very different sizes.
        change = rng.normal(size=(20, 3)) @ rng.normal(size=(3, 12)) + rng.normal(size=(20, 12))
        change *= np.exp(rng.normal(size=12))
        table = differing(change, np.zeros_like(change), seed)
        found += bool((table["p_family"] <= 0.05).any())
    assert found <= 13


def test_the_fewest_that_hold_half():
    assert fewest(np.array([1.0, 5.0, 2.0, 1.0])) == 1
    assert fewest(np.ones(10)) == 5
    assert fewest(np.array([3.0, 3.0, 1.0])) == 2


def curves_with(latent: float, raw: float, new: float = 0.1) -> pd.DataFrame:
    """Accuracies give or take 0.02."""
    rows = []
    for reader, single in (("latents", latent), ("raw", raw), ("reconstruction", 0.3), ("remainder", 0.2)):
        for arm, split in (("hidden", "paired"), ("T3", "leave-context-out"), ("restart T3", "leave-context-out")):
            value = single if arm == "hidden" else new if arm == "T3" else 0.1
            about = {"place": "v.7", "arm": arm, "split": split, "reader": reader}
            for k in (1, 64):
                rows.append({**about, "k": k, "accuracy": value, "low": value - 0.02, "high": value + 0.02})
    return pd.DataFrame(rows)


def of(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.04, "high": mean + 0.04}


@pytest.mark.parametrize(
    ("latent", "raw", "new", "said"),
    [
        (
            0.4,
            0.2,
            0.1,
            [
                "tells a digit better at v.7",
                "30.0 % (28.0 to 32.0) of the digits from all",
                "are not significantly read above",
            ],
        ),
        (0.2, 0.4, 0.1, ["tells a digit worse at v.7", "are not significantly read above"]),
        (0.30, 0.31, 0.1, ["does not tell a digit significantly better or worse", "are not significantly read above"]),
        (0.30, 0.31, 0.3, ["T3's latents read above the recomputed floor"]),
    ],
)
def test_the_sentence_on_single_latents_follows_the_intervals(latent: float, raw: float, new: float, said: list[str]):
    claims = {"single": {"v.7": of(latent - raw)}, "read": {"v.7": of(new - 0.1)}}
    sentence = answer_tells(curves_with(latent, raw, new), {"places": ["v.7"], "claims": claims})
    assert all(words in sentence for words in said)


@pytest.mark.parametrize(
    ("apart", "said"), [(0.3, "more than"), (-0.3, "less than"), (0.0, "not significantly more or less")]
)
def test_the_sentence_on_what_matters_follows_the_interval(apart: float, said: str):
    entry = {"claim": of(apart), "sets": {"differing": of(0.3), "whole": of(0.5)}}
    counts = {"T3": {reader: {"claimed": 3, "alive": 9} for reader in READERS}}
    metrics = {"places": ["v.7"], "exchange": {"v.7": entry}, "differing": {"v.7": counts}, "exchanged": 32}
    assert said in answer_differs(metrics)


def test_a_difference_where_there_can_be_none_is_a_control_that_fails():
    judged = {
        "unexplained": {"mean": 0.1, "low": 0.1, "high": 0.1},
        "unexplained_turned": {"mean": 1.0, "low": 1.0, "high": 1.0},
    }
    metrics = {"places": ["v.7"], "precision": 1e-7, "untouched": {"v.7": 1e-6}, "quality": {"v.7": judged}}
    assert all(holds for _, holds in controls(metrics))
    assert [holds for _, holds in controls({**metrics, "untouched": {"v.7": 1e-3}})] == [False, True]


def test_presets_fit_the_study():
    for name, preset in presets().items():
        if preset.study == "features":
            config = from_mapping(Config, preset.settings)
            assert preset.minutes, name
            assert config.trains or preset.minutes <= 3
