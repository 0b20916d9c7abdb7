"""The multihop study: reading against the plain way, the light cone, planted leaks, a whole run, and what is said of
it."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvprobe.studies.multihop.collect as collecting
import kvprobe.studies.multihop.narrative as telling
import kvprobe.studies.multihop.study as study
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.features import read_outs
from kvprobe.probing.splits import SPLITS
from kvprobe.report.page import write_report
from kvprobe.stats import Estimate
from kvprobe.studies.multihop.analyse import Analysis, analyse
from kvprobe.studies.multihop.arms import ARMS, DISTANCES, Arm, lowest_layer, summaries_seen
from kvprobe.studies.multihop.collect import PLACES, SHOWN, USE_ARMS, name_of, place, read_session
from kvprobe.studies.multihop.collected import Collected
from kvprobe.studies.multihop.config import Config
from kvprobe.studies.multihop.figures import accuracies
from kvprobe.studies.multihop.narrative import answer_new, answer_paired, answer_use, in_words, reach
from kvprobe.tasks.hops import SUMMARY_NAMES, TURN_NAMES, TURNS, Session, Turn, conversation
from kvprobe.text.tokens import Tokens
from tests.models import llama, tiny_tokenizer
from tests.studies.runs import assert_figures, give, interrupted

SMALL = Config(sessions=8, samples=32, folds=3, families=("v",))
CODES = ("48213", "90577", "33662")
N_LAYERS, SHALLOW = 10, 3
ROUND_OFF = 1e-5

each_arm = pytest.mark.parametrize("arm", ARMS)


def made_up(number: int) -> Session:
    first = Turn("code {code} so", "well", "a code")
    later = [Turn("and" + " the" * turn, "it is", "so" + " be" * (turn % 3)) for turn in range(1, TURNS)]
    return Session(f"made-{number}", "be kind" + " so" * number, "so?", "what is it?", "it is", (first, *later))


@pytest.fixture(autouse=True)
def short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collecting, telling):
        monkeypatch.setattr(module, "sessions", lambda: tuple(made_up(number) for number in range(30)))


@pytest.fixture(scope="module")
def deep() -> Model:
    return llama(seed=3, num_hidden_layers=N_LAYERS, tokenizer=tiny_tokenizer(), initializer_range=0.3)


@pytest.fixture(scope="module")
def read(deep: Model) -> dict[str, torch.Tensor]:
    return read_session(deep, made_up(1), CODES, ("k", "v"), batch=2)


def plainly(model: Model, tokens: Tokens, arm: Arm) -> tuple[list[dict[str, torch.Tensor]], KVCache]:
    """Each summary's features, and the last cache, by masking what the arm hides and nothing else."""
    found, cache = [], None
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
        found.append({family: read_outs(captured.stack(family))[0] for family in ("k", "v")})
        cache = captured.cache
    assert cache is not None
    return found, cache


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


@each_arm
@pytest.mark.parametrize("condition", ["retained", "restart"])
def test_shared_and_evicted_slots_change_nothing(deep: Model, read: dict[str, torch.Tensor], arm: Arm, condition: str):
    row = 2 if condition == "retained" else 0
    chat = conversation(made_up(1), CODES[2])
    tokens = (chat if condition == "retained" else chat.without("T1")).tokens(deep.tokenizer)
    expected, cache = plainly(deep, tokens, arm)
    for distance in DISTANCES:
        for family in ("k", "v"):
            close(read[name_of(condition, place(arm, distance), family)][row], expected[distance][family])
    question, answer = tokens.span("Q"), tokens.part("answer")
    _, logits = deep.extend(cache, tokens[question.start : answer.stop - 1], logits=5)
    logprob = logits[0].log_softmax(-1).gather(1, torch.tensor(tokens.ids[answer])[:, None])[:, 0]
    close(read["logprob"][2, USE_ARMS.index(arm if condition == "retained" else f"restart, {arm}")], logprob)


def test_shown_the_first_turn_the_question_alone_sees_it_again(deep: Model, read: dict[str, torch.Tensor]):
    tokens = conversation(made_up(1), CODES[0]).tokens(deep.tokenizer)
    _, cache = plainly(deep, tokens, "open")
    seen = cache.ledger.in_segments(["system", TURN_NAMES[0], *SUMMARY_NAMES])
    again = dataclasses.replace(cache, ledger=dataclasses.replace(cache.ledger, live=seen[None, :, None, :]))
    question, answer = tokens.span("Q"), tokens.part("answer")
    _, logits = deep.extend(again, tokens[question.start : answer.stop - 1], logits=5)
    logprob = logits[0].log_softmax(-1).gather(1, torch.tensor(tokens.ids[answer])[:, None])[:, 0]
    close(read["logprob"][0, USE_ARMS.index(SHOWN)], logprob)


def test_each_forced_hop_costs_a_layer_and_nothing_varies_below(read: dict[str, torch.Tensor]):
    assert [lowest_layer("hop-forced", distance) for distance in DISTANCES] == [1, 2, 3, 4, 5, 6, 7, 8]
    for arm in ("open", "skip"):
        assert [lowest_layer(arm, distance) for distance in DISTANCES] == [1, 2, 2, 2, 2, 2, 2, 2]
    for arm in ARMS:
        for distance in DISTANCES:
            for family in ("k", "v"):
                features = read[name_of("retained", place(arm, distance), family)]
                varying = (features - features[0]).abs().amax((0, 2, 3)) / features.abs().amax((0, 2, 3))
                lowest = lowest_layer(arm, distance)
                assert varying[:lowest].max() <= ROUND_OFF
                if arm != "hop-forced" or distance < 3:  # what hops further fades into round-off in a random model
                    assert varying[lowest:].min() > ROUND_OFF


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], Analysis]:
    """The analysis of features that hold all digits: at distance 0 in one frame; from 1 on in another; where hops are
    forced up to distance 2 alone. Every session adds an offset of its own. The restart holds nothing but that."""

    def build(config: Config) -> Analysis:
        rng = np.random.default_rng(5)
        codes = rng.integers(0, 10, (config.sessions, config.samples // config.sessions, 5))
        frames = rng.normal(size=(2, 5, 10, 64))
        folder = tmp_path_factory.mktemp("parts")
        paths = []
        for session, own in enumerate(codes):
            tensors: dict[str, torch.Tensor] = {"digits": torch.from_numpy(own)}
            for at in PLACES:
                offset = rng.normal(size=(1, 2, 2, 64)) * 3
                held = frames[min(at[1], 1)][np.arange(5), own].sum(1)[:, None, None] * (
                    at[0] != "hop-forced" or at[1] <= 2
                )
                held = held * np.array([0, 1])[:, None, None]  # layer 0 holds nothing
                noise = rng.normal(size=(len(own), 2, 2, 64)) * 0.3
                tensors[name_of("retained", at, "v")] = torch.from_numpy((offset + held + noise).astype(np.float32))
                tensors[name_of("restart", at, "v")] = torch.from_numpy(offset.astype(np.float32))
            for name in ("logprob", "margin", "correct"):
                tensors[name] = torch.from_numpy(rng.normal(size=(len(own), len(USE_ARMS), 5)).astype(np.float32))
            tensors["kl"] = torch.rand(len(own), len(USE_ARMS))
            paths.append(folder / f"{session}.safetensors")
            save_file(tensors, paths[-1])
        return analyse(Collected.load(paths, config), config)

    return build


def test_planted_leaks_are_found_where_they_are_and_pass_between_the_distances_that_share_them(
    planted: Callable[[Config], Analysis],
):
    metrics = planted(Config(sessions=12, samples=240, folds=3, families=("v",))).metrics
    mean = {
        (split, arm): [each["mean"] for each in metrics["accuracy"][split][arm]] for split in SPLITS for arm in ARMS
    }
    for arm in ("open", "skip"):
        assert min(mean["paired", arm]) > 0.9
        assert min(mean["leave-context-out", arm]) > 0.3
        assert reach(metrics, arm) == list(DISTANCES)
    assert min(mean["paired", "hop-forced"][:3]) > 0.9
    assert max(mean["paired", "hop-forced"][3:]) < 0.2
    for split in SPLITS:
        for arm in ARMS:
            assert max(each["mean"] for each in metrics["floor"][split][arm]) < 0.2
            assert all(each["low"] <= each["mean"] <= each["high"] for each in metrics["leak"][split][arm])
    assert min(each["mean"] for each in metrics["bits"]["paired"]["open"]) > 2
    assert all(abs(each["mean"]) < 0.2 for each in metrics["floor_bits"]["paired"]["open"])
    assert [each["low"] > 0.5 for each in metrics["versus"]["paired"]["skip"]] == [False] * 3 + [True] * 5
    table = accuracies(metrics["transfer"]["paired"]["open"])
    assert table[1:, 1:].min() > 0.9
    assert table[0, 0] > 0.9
    assert max(table[0, 1:].max(), table[1:, 0].max()) < 0.4
    assert {pick["layer"] for pick in metrics["transfer"]["paired"]["open"]["picks"]} == {1}
    assert accuracies(metrics["transfer"]["paired"]["hop-forced"])[1, 3:].max() < 0.25


@pytest.fixture(scope="module")
def shallow() -> Model:
    return llama(seed=3, num_hidden_layers=SHALLOW, tokenizer=tiny_tokenizer(), initializer_range=0.3)


@pytest.fixture(scope="module")
def finished(shallow: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, shallow)
        for module in (collecting, telling):
            patch.setattr(module, "sessions", lambda: tuple(made_up(number) for number in range(30)))
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


def test_a_run_holds_every_table_number_and_figure(finished: Run):
    assert finished.finished
    probes = finished.df("probes")
    assert len(probes) == len(PLACES) * 2 * len(SPLITS) * SHALLOW * 2
    assert ((probes["low"] <= probes["accuracy"] + 1e-9) & (probes["accuracy"] <= probes["high"] + 1e-9)).all()
    samples = finished.df()
    assert samples.groupby("measure").size().to_dict() == {
        "use": 32 * len(USE_ARMS),
        "probe": 32 * len(PLACES) * 2 * len(SPLITS),
    }
    assert_figures(finished, "by_distance", "by_layer_v", "transfer", "use")
    assert "The control holds" in json.dumps(finished.report)
    assert finished.metrics["light_cone"]["hop-forced"][SHALLOW]["there"] is None
    assert "hop-forced: only the last summary in view" in write_report(finished.path, finished.report).read_text()


def test_an_interrupted_reading_goes_on_where_it_stopped(
    shallow: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    collect = partial(collecting.collect, shallow, SMALL, Run(tmp_path))
    paths, calls = interrupted(collect, monkeypatch, collecting, "read_session", at=2)
    found = Collected.load(paths, SMALL)
    assert len(calls) == 2 + 7
    assert [len(codes) for _, _, codes, *_ in calls] == [4] * 9
    assert found.contexts.tolist() == [session for session in range(8) for _ in range(4)]
    assert ["".join(map(str, row)) for row in found.digits[4:8]] == calls[1][2] == calls[2][2]


def metrics_with(
    leaks: dict[str, list[float]], beyond: float = 0.0, gains: tuple[float, ...] = (0.0, 0.0, 0.0)
) -> dict[str, Any]:
    """Metrics with these paired leaks by arm, give or take 0.1."""

    def of(mean: float) -> dict[str, float]:
        return Estimate(mean, mean - 0.1, mean + 0.1, clusters=30, smallest=mean - 0.5, largest=mean + 0.5).record()

    each = {arm: [of(leak) for leak in own] for arm, own in leaks.items()}
    floor = {arm: [of(0.1)] * len(DISTANCES) for arm in ARMS}
    straight = [of(one - other) for one, other in zip(leaks["skip"], leaks["hop-forced"], strict=True)]
    return {
        "chance": 0.1,
        "accuracy": {"leave-context-out": each, "paired": each},
        "floor": {"paired": floor},
        "leak": {"leave-context-out": each, "paired": each},
        "claims": {
            "beyond": {arm: of(beyond) for arm in ARMS},
            "reach": each,
            "straight": straight,
            "use": {arm: of(gain) for arm, gain in zip(ARMS, gains, strict=True)},
        },
        "use": {SHOWN: {"margin": of(20.0)}},
    }


ALL, FEW, NONE = [0.5] * 8, [0.5] * 3 + [0.0] * 5, [0.0] * 8


@pytest.mark.parametrize(
    ("leaks", "said"),
    [
        ({"open": ALL, "hop-forced": FEW, "skip": ALL}, "at distances 0 to 2 only; what comes straight from the first "
        "summary is more"),
        ({"open": ALL, "hop-forced": ALL, "skip": FEW}, "at every distance; what comes straight from the first summary "
        "is not significantly more"),
        ({"open": NONE, "hop-forced": NONE, "skip": NONE}, "reads nothing significant beyond the first summary"),
    ],
)  # fmt: skip
def test_the_sentence_on_hops_follows_the_intervals(leaks: dict[str, list[float]], said: str):
    assert said in answer_paired(metrics_with(leaks))


@pytest.mark.parametrize(
    ("beyond", "said"), [(0.2, "more than the floor in the arms"), (0.0, "not significantly more than the floor")]
)
def test_the_sentence_on_new_sessions_follows_the_intervals(beyond: float, said: str):
    assert said in answer_new(metrics_with(dict.fromkeys(ARMS, ALL), beyond))


@pytest.mark.parametrize(
    ("gains", "start"),
    [
        ((0.5, 0.0, 0.0), "The model uses a little of it in the arm open ("),
        ((0.5, 0.0, 0.5), "The model uses a little of it in the arms open and skip ("),
        ((0.0, 0.0, 0.0), "No use of it"),
        ((0.0, -0.5, 0.0), "No use by the model was detected; in the arm hop-forced"),
        ((0.1005, -0.1005, 0.0), "No use of it"),  # intervals above zero, but by less than rounding would do
    ],
)
def test_the_sentence_on_use_follows_the_intervals(gains: tuple[float, ...], start: str):
    assert answer_use(metrics_with(dict.fromkeys(ARMS, ALL), gains=gains)).startswith(start)


def test_runs_of_distances_are_joined():
    assert in_words([]) == "none"
    assert in_words([2]) == "2"
    assert in_words([0, 1, 2, 5, 7]) == "0 to 2, 5 and 7"
