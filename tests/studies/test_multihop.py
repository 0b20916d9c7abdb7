"""The multihop study: reading against the plain way, the light cone, planted leaks, a whole run, and what the page
says of it."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

import kvprobe.studies.multihop.collect as collecting
import kvprobe.studies.multihop.conclude as concluding
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.probing.features import read_outs
from kvprobe.probing.splits import SPLITS
from kvprobe.studies import multihop
from kvprobe.studies.multihop import Config
from kvprobe.studies.multihop.collect import CONDITIONS, TRANSFERRED
from kvprobe.studies.multihop.conclude import conclude
from kvprobe.studies.multihop.reading import (
    ARMS,
    DISTANCES,
    PLACES,
    SHOWN,
    USE_ARMS,
    Arm,
    lowest_layer,
    name_of,
    place,
    read_session,
    summaries_seen,
)
from kvprobe.studies.multihop.study import STUDY
from kvprobe.tasks.hops import SUMMARY_NAMES, TURN_NAMES, TURNS, Session, Turn, conversation
from kvprobe.text.tokens import Tokens
from tests.models import any_model, llama, tiny_tokenizer
from tests.studies.runs import answer_of, assert_figures, close, every, in_steps

SMALL = Config(sessions=8, samples=32, folds=3, families=("v",))
MADE_UP = Config(sessions=12, samples=36, folds=3)
CODES = ("48213", "90577", "33662")
N_LAYERS, SHALLOW = 10, 3
ROUND_OFF = 1e-5

each_arm = pytest.mark.parametrize("arm", ARMS)


def session_of(number: int) -> Session:
    first = Turn("code {code} so", "well", "a code")
    later = [Turn("and" + " the" * turn, "it is", "so" + " be" * (turn % 3)) for turn in range(1, TURNS)]
    return Session(f"made-{number}", "be kind" + " so" * number, "so?", "what is it?", "it is", (first, *later))


@pytest.fixture(scope="module")
def deep() -> Model:
    return llama(seed=3, num_hidden_layers=N_LAYERS, tokenizer=tiny_tokenizer(), initializer_range=0.3)


@pytest.fixture(scope="module")
def read(deep: Model) -> dict[str, torch.Tensor]:
    return read_session(deep, session_of(1), CODES, ("k", "v"), batch=2)


def plainly(model: Model, tokens: Tokens, arm: Arm) -> tuple[list[dict[str, torch.Tensor]], KVCache]:
    """Each summary's features, and the last cache, by masking what the arm hides and nothing else."""
    features, cache = [], None
    for turn in range(1, TURNS + 2):
        seen = {"system", *(summaries_seen(arm, turn) if turn > 1 else ())}
        if cache is not None and (hidden := [name for name in cache.ledger.names if name not in seen]):
            cache = cache.mask(*hidden)
        if turn > TURNS:
            break
        stop = tokens.span(SUMMARY_NAMES[turn - 1]).stop
        start = 0 if cache is None else tokens.span(SUMMARY_NAMES[turn - 2]).stop
        captured = model.capture(
            tokens[start:stop], ("k", "v"), segments=SUMMARY_NAMES[turn - 1 : turn], past=cache, keep_cache=True
        )
        features.append({family: read_outs(captured.stack(family))[0] for family in ("k", "v")})
        cache = captured.cache
    assert cache is not None
    return features, cache


def logprob(model: Model, cache: KVCache, tokens: Tokens) -> torch.Tensor:
    """Of the code at the end of the question."""
    question, code = tokens.span("Q"), tokens.part("answer")
    _, logits = model.extend(cache, tokens[question.start : code.stop - 1], logits=5)
    return logits[0].log_softmax(-1).gather(1, torch.tensor(tokens.ids[code])[:, None])[:, 0]


@each_arm
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
    for arm in ("open", "skip"):
        assert [lowest_layer(arm, distance) for distance in DISTANCES] == [1, 2, 2, 2, 2, 2, 2, 2]
    for arm in ARMS:
        for distance in DISTANCES:
            for family in ("k", "v"):
                features = read[f"{name_of('retained', place(arm, distance))}.{family}"]
                varying = (features - features[0]).abs().amax((0, 2, 3)) / features.abs().amax((0, 2, 3))
                lowest = lowest_layer(arm, distance)
                assert varying[:lowest].max() <= ROUND_OFF
                if arm != "hop-forced" or distance < 3:  # what hops further fades into round-off in a random model
                    assert varying[lowest:].min() > ROUND_OFF


def planted(config: Config, folder: Path) -> Iterator[Path]:
    """Parts with features that hold all digits: at distance 0 in one frame; from 1 on in another; where hops are forced
    up to distance 2 alone. Every session adds an offset of its own. The restart holds nothing but that."""
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 10, (config.sessions, config.samples // config.sessions, 5))
    frames = rng.normal(size=(2, 5, 10, 64))
    for number, digits in enumerate(codes):
        tensors: dict[str, torch.Tensor] = {"labels": torch.from_numpy(digits)}
        for at in PLACES:
            offset = rng.normal(size=(1, 2, 2, 64)) * 3
            held = frames[min(at[1], 1)][np.arange(5), digits].sum(1)[:, None, None] * (
                at[0] != "hop-forced" or at[1] <= 2
            )
            held = held * np.array([0, 1])[:, None, None]  # layer 0 holds nothing
            noise = rng.normal(size=(len(digits), 2, 2, 64)) * 0.3
            tensors[f"{name_of('retained', at)}.v"] = torch.from_numpy((offset + held + noise).astype(np.float32))
            tensors[f"{name_of('restart', at)}.v"] = torch.from_numpy(offset.astype(np.float32))
        for name in ("logprob", "margin", "correct"):
            tensors[name] = torch.from_numpy(rng.integers(-64, 64, (len(digits), len(USE_ARMS), 5)) / 64)
        tensors["kl"] = torch.from_numpy(rng.random((len(digits), len(USE_ARMS))))
        save_file(tensors, folder / str(number))
        yield folder / str(number)


def test_planted_leaks_are_found_where_they_are_and_pass_between_the_distances_that_share_them(tmp_path: Path):
    config = Config(sessions=12, samples=120, folds=3, families=("v",))
    tables = collecting.tables(list(planted(config, tmp_path)), config)
    findings = conclude(tables, config, any_model()).findings

    def means(name: str, **keys: str) -> np.ndarray:
        return np.array([finding.value.mean for finding in findings.where(name, **keys)])

    retained, restart = ({"condition": condition} for condition in CONDITIONS)
    for arm in ("open", "skip"):
        assert means("read", split="paired", arm=arm, **retained).min() > 0.9
        assert means("read", split="leave-context-out", arm=arm, **retained).min() > 0.3
    assert all(findings.at("leak", split="paired", arm=arm, distance=distance).above() for arm, distance in PLACES[:8])
    hops = means("read", split="paired", arm="hop-forced", **retained)
    assert hops[:3].min() > 0.9 > 0.2 > hops[3:].max()
    assert max(means("read", **restart).max(), means("floor").max()) < 0.2
    assert means("bits", split="paired", arm="open", **retained).min() > 2
    assert np.abs(means("bits", split="paired", arm="open", **restart)).max() < 0.2
    direct = findings.where("direct", split="paired", arm="skip")
    assert [finding.value.above(0.5) for finding in direct] == [False] + [True] * 5
    assert findings.at("beyond", split="paired", arm="open").mean > 0.8
    table, forced = (means("transfer", split="paired", arm=arm).reshape(8, 8) for arm in ("open", "hop-forced"))
    assert min(table[1:, 1:].min(), table[0, 0]) > 0.9
    assert max(table[0, 1:].max(), table[1:, 0].max()) < 0.4
    assert forced[1, 3:].max() < 0.25
    elsewhere = findings.at("transfer_mean", split="paired", arm="open", tested_at="another").mean
    assert elsewhere == pytest.approx(table[~np.eye(8, dtype=bool)].mean())
    assert findings.values("transfer_picked", "layer", split="paired", arm="open") == [1]


@pytest.fixture(scope="module")
def shallow() -> Model:
    return llama(seed=3, num_hidden_layers=SHALLOW, tokenizer=tiny_tokenizer(), initializer_range=0.3)


@pytest.fixture(scope="module")
def finished(shallow: Model, root: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        for module in (collecting, concluding):
            patch.setattr(module, "sessions", lambda: tuple(session_of(number) for number in range(30)))
        return in_steps(lambda: multihop.run(SMALL, root, model=shallow))


def test_a_run_holds_every_table_number_and_figure(finished: Run):
    tables: list[Any] = [finished.df(name) for name in ("probes", "read", "samples")]
    probes, read, samples = tables
    assert len(probes) == len(PLACES) * 2 * len(SPLITS) * SHALLOW * 2
    assert ((probes["low"] <= probes["accuracy"] + 1e-9) & (probes["accuracy"] <= probes["high"] + 1e-9)).all()
    assert len(samples) == 32 * len(USE_ARMS)
    assert samples.groupby("context")["sample"].nunique().tolist() == [4] * 8
    assert len(read) == 32 * len(PLACES) * 2 * len(SPLITS)
    conclusion = Conclusion.of(finished.metrics)
    assert [control.holds for control in conclusion.controls] == [True]
    assert conclusion.findings.get("variation", arm="hop-forced", distance=SHALLOW, layers="there") is None
    gain = samples.groupby("condition")["margin"].mean()
    assert conclusion.findings.at("gain", arm="skip").mean == pytest.approx(
        gain["skip"] - gain["restart, skip"], abs=1e-9
    )
    assert_figures(finished, "by_distance", "by_layer_v", "transfer", "transfer_leave-context-out", "use", "said")


def made_up(accuracy: Any, margin: Any, varies: float = 0.0) -> Conclusion:
    """The conclusion where this is read, by row, and cached; K and V vary so much below the light cone too."""

    def contexts(made: pd.DataFrame) -> Any:
        return made["sample"] // 3

    cases, places = range(MADE_UP.samples), pd.DataFrame(PLACES, columns=["arm", "distance"])
    layers = places.merge(every(family=["v"], layer=range(N_LAYERS)), how="cross")
    asked = every(sample=cases, condition=USE_ARMS).assign(logprob=-9.0, token_accuracy=0.1, kl=0.5, code="48213")
    picks = places.merge(every(split=SPLITS, picks=("read", "transfer")), "cross")
    read = places.merge(every(split=SPLITS, condition=CONDITIONS, sample=cases), "cross")
    transfer = every(split=TRANSFERRED, arm=ARMS, trained=(0, 7), tested=(0, 7), sample=cases)
    tables = {
        "samples": asked.assign(context=contexts, margin=margin),
        "read": read.assign(context=contexts, accuracy=accuracy, bits=0.5),
        "transfer": transfer.assign(context=contexts, accuracy=0.2),
        "picks": picks.assign(family="v", layer=1, read="mean"),
        "probes": layers.assign(condition="retained", split="paired", read="mean", accuracy=0.1 + layers["layer"] / 50),
        "variation": layers.assign(variation=varies),
    }
    return conclude(tables, MADE_UP, any_model())


def leaking(reach: dict[str, int], gains: dict[str, float], varies: float = 0.0) -> Conclusion:
    """The conclusion where the code is read up to these distances, by arm, and caches give its margin these gains."""
    return made_up(
        lambda rows: np.where(
            (rows["condition"] == "retained") & (rows["distance"] <= rows["arm"].map(reach)), 0.5, 0.1
        ),
        lambda rows: rows["condition"].map(gains).fillna(0.0),
        varies,
    )


EVERYWHERE, NOWHERE = ({"all": reach} | {str(arm): reach for arm in ARMS} for reach in (7, -1))


@cache
def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
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
