"""The multihop study: reading against the plain way, the light cone, planted leaks, a whole run, and what the page
says of it."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.multihop.collect as collecting
import kvprobe.studies.multihop.conclude as concluding
import kvprobe.studies.multihop.reading as reading
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.probing.arms import Arms
from kvprobe.probing.by_split import folds_by_split
from kvprobe.probing.features import read_outs
from kvprobe.probing.splits import SPLITS
from kvprobe.studies.multihop import Config
from kvprobe.studies.multihop.collect import CONDITIONS, TRANSFERRED
from kvprobe.studies.multihop.conclude import conclude
from kvprobe.studies.multihop.hops import SUMMARY_NAMES, TURN_NAMES, TURNS, HopSession, HopTurn, conversation
from kvprobe.studies.multihop.reading import ARMS, DISTANCES, PLACES, SHOWN, USE_ARMS, Arm, lowest_layer, name_of, place
from kvprobe.studies.multihop.study import STUDY
from kvprobe.tasks.passcode import CODE
from kvprobe.text.tokens import Tokens
from tests.experiments.made_up import answer_of
from tests.models import any_model, llama, tiny_tokenizer
from tests.studies.runs import close, every, whole_run

SMALL = Config(sessions=8, samples=32, folds=3, families=("v",))
MADE_UP = Config(sessions=12, samples=36, folds=3)
CODES = ("48213", "90577", "33662")
N_LAYERS, SHALLOW = 10, 3
ROUND_OFF = 1e-5
UNREAD = ["by_layer_resid_post", "by_layer_k_pre", "by_layer_k"]


def shaped(layers: int) -> Model:
    return llama(seed=3, num_hidden_layers=layers, tokenizer=tiny_tokenizer(), initializer_range=0.3)


def session_of(number: int) -> HopSession:
    first = HopTurn("code {code} so", "well", "a code")
    later = [HopTurn("and" + " the" * turn, "it is", "so" + " be" * (turn % 3)) for turn in range(1, TURNS)]
    return HopSession(f"made-{number}", "be kind" + " so" * number, "so?", "what is it?", "it is", (first, *later))


@pytest.fixture(scope="module")
def deep() -> Model:
    return shaped(N_LAYERS)


@pytest.fixture(scope="module")
def read(deep: Model) -> dict[str, torch.Tensor]:
    return reading.read_session(deep, session_of(1), CODES, ("k", "v"), batch=2)


def plainly(model: Model, tokens: Tokens, arm: Arm) -> tuple[list[dict[str, torch.Tensor]], KVCache]:
    """Each summary's features, and the last cache, by masking what the arm hides and nothing else."""

    def seen(cache: KVCache, turn: int) -> KVCache:
        hidden = set(cache.ledger.names) - {"system", *reading.summaries_seen(arm, turn)}
        return cache.mask(*hidden) if hidden else cache

    features, cache, start = [], None, 0
    for turn, summary in enumerate(SUMMARY_NAMES, 1):
        stop, past = tokens.span(summary).stop, cache and seen(cache, turn)
        read = model.capture(tokens[start:stop], ("k", "v"), segments=[summary], past=past, keep_cache=True)
        features.append({family: read_outs(read.stack(family))[0] for family in ("k", "v")})
        cache, start = read.cache, stop
    assert cache is not None
    return features, seen(cache, TURNS + 1)


def logprob(model: Model, cache: KVCache, tokens: Tokens) -> torch.Tensor:
    """Of the code at the end of the question."""
    question, code = tokens.span("Q"), tokens.part("answer")
    _, logits = model.extend(cache, tokens[question.start : code.stop - 1], logits=5)
    return logits[0].log_softmax(-1).gather(1, torch.tensor(tokens.ids[code])[:, None])[:, 0]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("condition", ["retained", "restart"])
def test_shared_and_evicted_slots_change_nothing(deep: Model, read: dict[str, torch.Tensor], arm: Arm, condition: str):
    row = 2 if condition == "retained" else 0
    chat = conversation(session_of(1), CODES[2])
    tokens = (chat if condition == "retained" else chat.without("T1")).tokens(deep.tokenizer)
    expected, cache = plainly(deep, tokens, arm)
    for distance in DISTANCES:
        for family in ("k", "v"):
            close(read[f"{name_of(condition, place(arm, distance))}.{family}"][row], expected[distance][family])
    asked = USE_ARMS.index(arm if condition == "retained" else f"restart, {arm}")
    close(read["logprob"][2, asked], logprob(deep, cache, tokens))


def test_shown_the_first_turn_the_question_alone_sees_it_again(deep: Model, read: dict[str, torch.Tensor]):
    tokens = conversation(session_of(1), CODES[0]).tokens(deep.tokenizer)
    _, cache = plainly(deep, tokens, "open")
    seen = cache.ledger.in_segments(["system", TURN_NAMES[0], *SUMMARY_NAMES])
    again = dataclasses.replace(cache, ledger=dataclasses.replace(cache.ledger, live=seen[None, :, None, :]))
    close(read["logprob"][0, USE_ARMS.index(SHOWN)], logprob(deep, again, tokens))


def test_each_forced_hop_costs_a_layer_and_nothing_varies_below(read: dict[str, torch.Tensor]):
    assert [lowest_layer("hop-forced", distance) for distance in DISTANCES] == [1, 2, 3, 4, 5, 6, 7, 8]
    for arm, distance in PLACES:
        lowest = lowest_layer(arm, distance)
        assert arm == "hop-forced" or lowest == min(1 + distance, 2)
        for family in ("k", "v"):
            features = read[f"{name_of('retained', (arm, distance))}.{family}"]
            varying = (features - features[0]).abs().amax((0, 2, 3)) / features.abs().amax((0, 2, 3))
            assert varying[:lowest].max() <= ROUND_OFF
            if arm != "hop-forced" or distance < 3:  # what hops further fades into round-off in a random model
                assert varying[lowest:].min() > ROUND_OFF


def planted(rng: np.random.Generator) -> Arms:
    """Arms whose layer 1 holds all digits: at distance 0 in one frame, from 1 on in another, and where hops are forced
    up to distance 2 alone. Every session adds an offset of its own. The restart holds nothing but that."""
    owners, digits, read = np.repeat(np.arange(12), 10), rng.integers(0, 10, (120, 5)), {}
    frames = rng.normal(size=(2, 5, 10, 64))
    for at in PLACES:
        offset, held = rng.normal(size=(12, 2, 2, 64)) * 3, np.zeros((120, 2, 2, 64))
        if at[0] != "hop-forced" or at[1] <= 2:
            held[:, 1] = frames[min(at[1], 1)][np.arange(5), digits].sum(1)[:, None]
        varying = offset[owners] + held + rng.normal(size=held.shape) * 0.3
        for condition, tensor in (("retained", varying), ("restart", offset)):
            read[f"{name_of(condition, at)}.v"] = torch.from_numpy(tensor).float()
    return Arms(read.__getitem__, ("v",), torch.from_numpy(digits).T.contiguous(), owners, CODE)


def test_planted_leaks_are_found_where_they_are_and_pass_between_the_distances_that_share_them():
    rng = np.random.default_rng(5)
    arms = planted(rng)
    tables: dict[str, Any] = collecting.fitted(arms, folds_by_split(arms.contexts, 3, rng))
    read = tables["read"].groupby(["condition", "split", "arm", "distance"])[["accuracy", "bits"]].mean()
    for split, least in (("paired", 0.9), ("leave-context-out", 0.3)):
        retained = read["accuracy"]["retained", split]
        assert min(retained.drop("hop-forced").min(), retained["hop-forced", 2]) > least
        assert retained["hop-forced"].drop(2).max() < 0.2
    assert read["accuracy"]["restart"].max() < 0.2
    assert read["bits"]["retained", "paired", "open"].min() > 2
    transfer = tables["transfer"].groupby(["split", "arm", "trained", "tested"])["accuracy"].mean()
    table, forced = (transfer["paired", arm].to_numpy().reshape(8, 8) for arm in ("open", "hop-forced"))
    assert min(table[1:, 1:].min(), table[0, 0]) > 0.9
    assert max(table[0, 1:].max(), table[1:, 0].max()) < 0.4
    assert forced[1, 2] > 0.9 > 0.25 > forced[1, 3:].max()
    assert tables["picks"].query("picks == 'transfer' and arm == 'open'")["layer"].unique().tolist() == [1]


@pytest.fixture(scope="module")
def finished(root: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        for module in (collecting, concluding):
            patch.setattr(module, "sessions", lambda: tuple(session_of(number) for number in range(30)))
        return whole_run(STUDY, SMALL, shaped(SHALLOW), root, [True], UNREAD)


def test_the_numbers_of_a_run_are_those_of_its_tables(finished: Run):
    samples: Any = finished.df("samples")
    assert samples.groupby("context")["sample"].nunique().tolist() == [4] * 8
    findings = Conclusion.of(finished.metrics).findings
    assert findings.get("variation", arm="hop-forced", distance=SHALLOW, layers="there") is None
    margins = samples.groupby("condition")["margin"].mean()
    assert findings.at("gain", arm="skip").mean == pytest.approx(margins["skip"] - margins["restart, skip"], abs=1e-9)


def of_samples(**levels: Any) -> pd.DataFrame:
    rows = every(sample=range(MADE_UP.samples), **levels)
    return rows.assign(context=rows["sample"] // 3)


def made_up(accuracy: Any, margin: Any, varies: float = 0.0) -> Conclusion:
    """The conclusion where this is read, by row, and cached; K and V vary so much below the light cone too."""
    places = pd.DataFrame(PLACES, columns=["arm", "distance"])
    layers = places.merge(every(family=["v"], layer=range(N_LAYERS)), "cross")
    read = places.merge(of_samples(split=SPLITS, condition=CONDITIONS), "cross")
    asked = of_samples(condition=USE_ARMS).assign(logprob=-9.0, token_accuracy=0.1, kl=0.5, code="48213")
    picks = places.merge(every(split=SPLITS, picks=("read", "transfer")), "cross")
    tables = {
        "samples": asked.assign(margin=margin),
        "read": read.assign(accuracy=accuracy, bits=0.5),
        "transfer": of_samples(split=TRANSFERRED, arm=ARMS, trained=(0, 7), tested=(0, 7)).assign(accuracy=0.2),
        "picks": picks.assign(family="v", layer=1, read="mean"),
        "probes": layers.assign(condition="retained", split="paired", read="mean", accuracy=0.1 + layers["layer"] / 50),
        "variation": layers.assign(variation=varies),
    }
    return conclude(tables, MADE_UP, any_model())


def leaking(reach: dict[str, int], gains: dict[str, float], varies: float = 0.0) -> Conclusion:
    """The conclusion where the code is read up to these distances, by arm, and caches give its margin these gains."""

    def accuracy(rows: pd.DataFrame) -> Any:
        return np.where((rows["condition"] == "retained") & (rows["distance"] <= rows["arm"].map(reach)), 0.5, 0.1)

    return made_up(accuracy, lambda rows: rows["condition"].map(gains).fillna(0.0), varies)


EVERYWHERE, NOWHERE = ({"all": reach} | {str(arm): reach for arm in ARMS} for reach in (7, -1))


@cache
def example() -> tuple[Config, Conclusion]:
    return MADE_UP, leaking({**EVERYWHERE, "hop-forced": 3}, {})


def noise(rng: np.random.Generator) -> Conclusion:
    """Sessions differ in nothing but chance, and so do conditions and arms."""
    return made_up(lambda rows: rng.binomial(5, 0.1, len(rows)) / 5, lambda rows: rng.normal(size=len(rows)))


@pytest.mark.parametrize(
    ("distances", "gains", "way", "use"),
    [
        (EVERYWHERE | {"hop-forced": 3}, {"open": 0.5}, "distances 0 to 3 if only the last does, so that every hop is "
         "forced; what comes straight from the first is detectably more than what comes by hops at distances 4 to 7.",
         "uses a little of it in the arm open."),
        (EVERYWHERE | {"skip": 2}, {"open": 0.5, "skip": 0.5, "hop-forced": -0.5}, "0 to 2 if only the first does",
         "in the arms open and skip, and is turned away from it in the arm hop-forced."),
        (NOWHERE | {"all": 0}, {"hop-forced": -0.5}, "at distance 0 if all", "No use by the model was detected; in"),
        (NOWHERE, {"open": 5e-4, "skip": -5e-4}, "at no distance if all", "does not detectably use any of it."),
    ],
)  # fmt: skip
def test_the_answer_follows_the_intervals(
    distances: dict[str, int], gains: dict[str, float], way: str, use: str, tmp_path: Path
):
    said = answer_of(STUDY, MADE_UP, leaking(distances, gains), tmp_path)
    assert way in said
    assert use in said


def test_the_intervals_of_the_answer_hold_together():
    findings = example()[1].findings
    assert {finding.comparisons for finding in findings.where("leak", split="paired")} == {3 + len(PLACES) + 6 + 3}
    assert {finding.comparisons for finding in findings.where("direct", split="random")} == {12}


def test_a_code_that_varies_below_the_light_cone_fails_the_control():
    assert [leaking(EVERYWHERE, {}, varies).controls[0].holds for varies in (1e-6, 1e-3)] == [True, False]
