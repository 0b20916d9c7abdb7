"""The features study: a whole run on a tiny model, what each arm reads, and what is concluded from made-up numbers."""

import dataclasses
import json
import re
from functools import cache
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.features.collect as collecting
import kvprobe.studies.features.prepare as preparing
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.probing.splits import SPLITS
from kvprobe.saes import Dictionary, Place, training
from kvprobe.studies.features import Config
from kvprobe.studies.features.collect import ARMS, PARTS
from kvprobe.studies.features.conclude import conclude
from kvprobe.studies.features.reading import READERS, RESTARTED, UNTOUCHED, read_context, restarted
from kvprobe.studies.features.study import STUDY
from kvprobe.tasks import facts, sessions
from kvprobe.tasks.passcode import contexts, conversation
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.saes.test_quality import identity

SMALL = Config(places=("v.1",), width=12, active=3, written=3, length=10, tokens=2048, contexts=8, codes=3, folds=3)
MODEL, HOLD = "wordy", [True, False]
CODES = ("48213", "90577", "13662")


@pytest.fixture(autouse=True, scope="module")
def few_texts() -> Any:
    two = facts.facts()[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "facts", lambda: two)
        patch.setattr(sessions, "sessions", lambda: ())
        patch.setattr(collecting, "SPLICED", 2)
        patch.setattr(collecting, "KS", (1,))
        yield


def test_a_run_holds_every_table_figure_and_dictionary_and_no_activations(finished: Run, wordy: Model):
    conclusion = Conclusion.of(finished.metrics)
    columns = len(RESTARTED) * (16 + 2 * SMALL.width) + 16  # the last where nothing may differ
    assert len(finished.df("means")) == SMALL.contexts * columns
    curves: Any = finished.df("samples").groupby(["arm", "split", "reader", "k"])["sample"].nunique()
    assert curves.eq(SMALL.contexts * SMALL.codes).all()
    assert len(curves) == len(ARMS) * len(SPLITS) * (2 * len(READERS) + len(PARTS))
    assert not (finished.path / "parts").exists()
    kept = Dictionary.load(finished.path / "dictionaries" / "v.1", wordy)
    assert (kept.width, str(kept.place)) == (SMALL.width, "v.1")
    assert conclusion.findings.at("round_off", place="v.1").mean < 1e-4
    assert (finished.path / "report.html").read_text().count('data-component="ColoredTokensMulti"') > 2


def test_dictionaries_are_trained_once_and_can_be_studied_again(
    finished: Run, wordy: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "train", None)
    again = Run(copytree(finished.path, tmp_path / "again"))
    assert [str(dictionary.place) for dictionary in preparing.prepare(wordy, SMALL, again)[0]] == ["v.1"]
    config = dataclasses.replace(SMALL, dictionaries=(str(finished.path / "dictionaries" / "v.1"),))
    (loaded,), shards = preparing.prepare(wordy, config, Run(tmp_path))
    assert loaded.place in shards.places


def test_each_arm_is_what_reading_the_conversation_by_itself_gives(wordy: Model):
    model, context = wordy, contexts()[0]
    features = Dictionary(identity(32), Place("resid_post", 1))
    means = read_context(model, context, CODES, {"resid_post.1": (features, features.rotated(0))})
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
        row = 1 if len(means[f"resid_post.1.{arm}.raw"]) > 1 else 0
        torch.testing.assert_close(means[f"resid_post.1.{arm}.raw"][row], slots.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            means[f"resid_post.1.{arm}.latents"][row], features.encode(slots).mean(0), rtol=1e-4, atol=1e-5
        )


TWO = Config(contexts=16, codes=4, places=("resid_post.7", "v.7"))
ONE = dataclasses.replace(TWO, places=("v.7",))
VIEW = {"caption": "Latent 0.", "tokens": ["the ", "code"], "labels": ["activation"], "values": [[0.0, 1.0]]}
EFFECTS = {"single": 0.4, "seen": 0.4, "beyond": 0.7, "differ": 0.5}


def made_up(
    config: Config, effects: dict[str, float], seed: int = 0, off: float = 0.0, turned: float = 5.0
) -> Conclusion:
    """The conclusion of tables with these effects at every place, the fourth on the first latent of T3."""
    effect, rng = {name: effects.get(name, 0.0) for name in EFFECTS}, np.random.default_rng(seed)
    hard, cases = rng.uniform(0.2, 0.4, config.contexts), range(config.contexts)

    def table(*columns: str, **keys: Any) -> Any:
        rows = pd.DataFrame(list(product(config.places, *keys.values())), columns=["place", *keys])
        return rows.assign(**{name: rng.uniform(1, 2, len(rows)) for name in columns})

    texts = table("error", "clean", "spliced", "zero", "kl_spliced", "kl_zero", text=cases)
    texts = texts.assign(
        mean=2, kl_mean=20, variance=9, turned=turned * texts["error"], active=64, tokens=9, predicted=9
    )
    means = table("restart", segment=(*RESTARTED, UNTOUCHED), reader=READERS, context=cases, latent=range(4))
    means = means[(means["segment"] != UNTOUCHED) | (means["reader"] == "raw")]
    planted = effect["differ"] * ((means["segment"] == "T3") & (means["latent"] == 0)) + rng.normal(0, 0.1, len(means))
    means["retained"] = means["restart"] + planted.where(means["segment"] != UNTOUCHED, off)
    samples = table(arm=ARMS, split=SPLITS, reader=(*READERS, *PARTS), k=(1, 4), sample=range(16 * config.codes))
    samples = samples.assign(context=samples["sample"] // config.codes, every=samples["k"] == 4)
    ahead = effect["single"] * ((samples["arm"] == "hidden") & (samples["reader"] == "latents") & (samples["k"] == 1))
    ahead += effect["seen"] * ((samples["arm"] == "T3") & samples["every"])
    samples["right"] = rng.binomial(5, np.clip(hard[samples["context"]] + ahead, 0, 1)) / 5
    exchanges = table("kl", set=("retained", "whole", "all", "differing", *["random"] * 4), context=cases)
    exchanges["kl"] -= effect["beyond"] * (exchanges["set"] == "differing")
    shown = table(why=(*RESTARTED, "digits"), latent=(0, 3))
    shown["eta"] = np.where(shown["why"] == "digits", 0.1, np.nan)
    activating = table(latent=(0, 3)).assign(density=0.1, words="' gate', ' code'", view=json.dumps(VIEW))
    notes = {"place": config.places, "notes": json.dumps({"kvprobe_tokens": 500_000, "kvprobe_recorded": 101_463})}
    tables = {"texts": texts, "means": means, "samples": samples, "exchanges": exchanges, "shown": shown}
    tables |= {
        "latents": table("density", latent=range(4)).assign(density=lambda rows: rows["density"] / 8),
        "activating": activating,
    }
    return conclude({**tables, "dictionaries": pd.DataFrame(notes)}, config, any_model())


@cache
def example() -> tuple[Config, Conclusion]:
    return ONE, made_up(ONE, EFFECTS)


def noise(rng: np.random.Generator) -> Conclusion:
    """Conversations differ, and nothing else."""
    return made_up(TWO, {}, int(rng.integers(2**32)))


def test_findings_are_what_was_put_in():
    findings, t3 = example()[1].findings, {"place": "v.7", "segment": "T3"}
    for name in ("single", "seen"):
        assert findings.at(name, place="v.7").mean == pytest.approx(0.4, abs=0.1)
    assert [findings.at("count", **t3, reader="latents", of=of).mean for of in ("claimed", "half")] == [1, 1]
    assert findings.at("difference", **t3, latent=0).mean == pytest.approx(0.5, abs=0.1)
    differing, random = (findings.at("carried", **t3, set=name).mean for name in ("differing", "random"))
    assert findings.at("beyond", place="v.7").mean == pytest.approx(differing - random)
    # Three claims, and two counts.
    assert [findings.finding(name, place="v.7").comparisons for name in ("single", "seen", "beyond")] == [5] * 3


@pytest.mark.parametrize(("sign", "phrase"), [(1, "above"), (-1, "below"), (0, "unclear")])
def test_the_answer_follows_the_intervals(sign: int, phrase: str, tmp_path: Path):
    effects = {name: 1.3 * sign * effect for name, effect in EFFECTS.items()}
    said = answer_of(STUDY, TWO, made_up(TWO, effects), tmp_path)
    assert f"At resid_post.7, {abs(sign)} of 4 latents" in said
    verdicts = re.findall(r"(?:most carry|hidden number|T3's latents) ([a-z ]+) at resid_post.7 and v.7", said)
    assert verdicts == [getattr(claim, phrase) for claim in STUDY.claims]


@pytest.mark.parametrize(
    ("wrong", "holds"), [({}, [True, True]), ({"off": 1e-3}, [False, True]), ({"turned": 1.0}, [True, False])]
)
def test_a_difference_where_there_can_be_none_and_a_turned_dictionary_as_good_fail_controls(
    wrong: dict[str, Any], holds: list[bool]
):
    conclusion = made_up(TWO, {}, **wrong)
    assert [control.holds for control in conclusion.controls] == holds * 2
