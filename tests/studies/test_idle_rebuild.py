"""The idle-rebuild study on a tiny model, with shortened sessions: what is shared must equal what is read one by one;
and what made-up measurements decide."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.policies import MaskSpans, RestartInPlace, RestartRebuilt
from kvprobe.report.document import passages_of
from kvprobe.stats import FEWEST
from kvprobe.studies import idle_rebuild
from kvprobe.studies.idle_rebuild import collect as collecting
from kvprobe.studies.idle_rebuild.collect import (
    AFTER,
    ARMS,
    LISTENERS,
    MEASURED,
    REFERENCES,
    SHARED,
    SPEAKERS,
    joined,
    read_session,
    rebuilt,
    relative_distance,
    tables_of,
)
from kvprobe.studies.idle_rebuild.conclude import concluded
from kvprobe.studies.idle_rebuild.config import AVAILABLE_SESSIONS, Config
from kvprobe.studies.idle_rebuild.study import STUDY
from kvprobe.tasks.sessions import SUMMARISED, TURNS, Session, conversation, sessions
from kvprobe.text.transcript import PositionMode
from tests.refusals import refused
from tests.studies.runs import assert_figures, page_of

SMALL = Config(sessions=2, continuation=3)
ROUND_OFF = 1e-5


def shortened(session: Session) -> Session:
    """The session with the beginnings of its messages alone, so that a test can read it."""

    def first(text: str, words: int) -> str:
        return " ".join(text.split()[:words])

    turns = tuple(
        dataclasses.replace(turn, user=first(turn.user, 5), assistant=first(turn.assistant, 6))
        for turn in session.turns
    )
    return dataclasses.replace(
        session, system=first(session.system, 6), turns=turns, summary=first(session.summary, 10)
    )


SHORT = tuple(map(shortened, sessions()))


@pytest.fixture(scope="module")
def read(deep: Model) -> tuple[dict[str, torch.Tensor], ...]:
    """What is measured of two sessions; the turns 4 to 8 of the first are measured again below, one by one."""
    return tuple(read_session(deep, session, SMALL.continuation) for session in SHORT[: SMALL.sessions])


@pytest.fixture(scope="module")
def finished(deep: Model, read: tuple[dict[str, torch.Tensor], ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "sessions", lambda: SHORT)
        patch.setattr(collecting, "read_session", lambda _, session, __: read[SHORT.index(session)])
        return idle_rebuild.run(SMALL, tmp_path_factory.mktemp("runs"), model=deep)


def visible(model: Model, turn: int, *unread: str, mode: PositionMode = "contiguous") -> KVCache:
    """The cache of the first session's question at this turn, read with everything before it that can be seen."""
    tokens = conversation(SHORT[0]).without(*SUMMARISED, *unread, mode=mode).tokens(model.tokenizer)
    return model.prefill(tokens[: tokens.part(f"reply{turn}").start - 1])


def compacted(model: Model, turn: int) -> KVCache:
    """The same in the compacted run: message by message, in one row."""
    tokens = conversation(SHORT[0]).tokens(model.tokenizer)
    cache = model.prefill(tokens[: tokens.span("summary").stop]).mask(*SUMMARISED)
    for between in range(AFTER[0], turn):
        cache, _ = model.extend(cache, tokens[tokens.span(f"T{between}")])
    cache, _ = model.extend(cache, tokens[tokens.span(f"T{turn}").start : tokens.part(f"reply{turn}").start - 1])
    return cache


def logits_along(model: Model, cache: KVCache, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that each token of the scripted reply meets, which is read token by token; and its surprise."""
    tokens = conversation(SHORT[0]).tokens(model.tokenizer)
    reply, met = tokens.part(f"reply{turn}"), []
    for place in range(reply.start - 1, reply.stop - 1):
        cache, logits = model.extend(cache, tokens[place : place + 1].shifted(int(cache.ledger.following)))
        met.append(logits[0, -1])
    found = torch.stack(met)
    return found, -found.log_softmax(-1)[range(len(met)), list(tokens.ids[reply])]


@pytest.mark.parametrize("turn", [4, 7])
@pytest.mark.parametrize(("policy", "mode"), [(RestartRebuilt, "contiguous"), (RestartInPlace, "gapped")])
def test_a_rebuild_is_a_prefill_of_the_conversation_without_the_hidden_turns(
    deep: Model, turn: int, policy: type[MaskSpans], mode: PositionMode
):
    tokens = conversation(SHORT[0]).tokens(deep.tokenizer)
    fresh = conversation(SHORT[0]).without(*SUMMARISED, mode=mode).tokens(deep.tokenizer)
    expected = deep.prefill(fresh[: fresh.span(f"T{turn}").start])
    kept = deep.prefill(tokens[: tokens.span(f"T{turn}").start])
    # Whether the cache to be dropped was compacted does not matter: only its text is read.
    for start in (kept, deep.apply(MaskSpans(SUMMARISED), kept)):
        found = deep.apply(policy(SUMMARISED), start)
        assert torch.equal(found.ledger.positions, expected.ledger.positions)
        assert torch.equal(found.ledger.tokens, expected.ledger.tokens)
        for one, other in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=ROUND_OFF * float(other.abs().max()))
    if policy is RestartRebuilt:
        torch.testing.assert_close(rebuilt(deep, tokens, kept, turn).keys[-1], found.keys[-1], rtol=0, atol=1e-4)


READ_AT_ONCE: list[tuple[tuple[str, ...], PositionMode]] = [
    (("rebuilt4", "rebuilt6"), "contiguous"),
    (("in_place",), "gapped"),
]
"""Arms that must be what reading the visible text of turn 6 at once gives."""


def test_the_divergence_is_that_of_reading_token_by_token(deep: Model, read: tuple[dict, ...]):
    turn = 6
    reference, _ = logits_along(deep, compacted(deep, turn), turn)
    for arms, mode in READ_AT_ONCE:
        logits, surprise = logits_along(deep, visible(deep, turn, mode=mode), turn)
        kl, agrees = divergence(reference, logits)
        assert kl.mean() > 1e-3
        for arm in arms:
            place = (ARMS.index(arm), MEASURED.index(turn), slice(len(kl)))
            torch.testing.assert_close(read[0]["kl"][(0, *place)], kl, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(read[0]["nll"][place], surprise, rtol=1e-3, atol=1e-3)
            assert torch.equal(read[0]["agrees"][(0, *place)], agrees.float())
            assert read[0]["kl"][0, ARMS.index(arm), MEASURED.index(turn), len(kl) :].isnan().all()


def test_a_question_put_early_is_the_session_without_the_turns_between(deep: Model, read: tuple[dict, ...]):
    _, surprise = logits_along(deep, visible(deep, 7, "T5", "T6"), 7)
    place = (AFTER.index(7), 1, slice(len(surprise)))
    torch.testing.assert_close(read[0]["early_nll"][(1, *place)], surprise, rtol=1e-3, atol=1e-3)
    # Put where it belongs, it is the session itself.
    own_place = read[0]["early_kl"][AFTER.index(7), AFTER.index(7)]
    there = read[0]["kl"][0, ARMS.index("rebuilt7"), MEASURED.index(7)]
    torch.testing.assert_close(own_place, there, rtol=0, atol=0, equal_nan=True)


def test_the_tokens_before_the_first_difference_are_those_that_both_would_say(deep: Model, read: tuple[dict, ...]):
    tokens, turn = conversation(SHORT[0]).tokens(deep.tokenizer), 6
    last = tokens[tokens.part(f"reply{turn}").start - 1 :][:1]
    said = []
    for cache in (compacted(deep, turn), visible(deep, turn)):
        ids, asked = [], last.shifted(int(cache.ledger.following))
        for _ in range(SMALL.continuation):
            cache, logits = deep.extend(cache, asked)
            ids.append(int(logits[0, -1].argmax()))
            asked = type(last).of(ids[-1:], "own", int(cache.ledger.following))
        said.append(ids)
    same = [*(one == other for one, other in zip(*said, strict=True)), False]
    own: Any = tables_of(read[0])["samples"].query(f"reply == 'own' and reference == 'compacted' and turn == {turn}")
    assert own.set_index("arm").loc["rebuilt", "alike"] == same.index(False)
    for row, speaker in enumerate(SPEAKERS):
        assert np.nanmin(read[0]["own_agrees"][row, LISTENERS.index(speaker)]) == 1


def test_a_run_holds_every_table_and_figure_and_its_controls_hold(finished: Run):
    samples, found = finished.df(), Conclusion.of(finished.metrics)
    counts: Any = samples.groupby("reply").size() / SMALL.sessions
    assert counts["own"] == len(SPEAKERS) * len(LISTENERS) * len(AFTER)
    assert counts["early"] == 2 * len(AFTER) * (len(AFTER) + 1) // 2
    assert set(finished.df("tokens")["arm"]) == {*ARMS, "rebuilt"}
    assert len(finished.df("layers")) == SMALL.sessions * 2 * 4 * len(SHARED)
    assert [control.holds for control in found.controls] == [True] * 3
    findings = found.findings
    assert findings.at("kl", turns="all", reference="compacted", run="rebuilt").smallest > 100 * ROUND_OFF
    assert findings.at("kl", turns="all", reference="compacted", run="compacted").largest < ROUND_OFF
    assert len(findings.where("matrix")) == len(MEASURED) * (len(MEASURED) + 1) // 2
    assert "2 sessions are too few for an interval" in found.warnings[0]
    assert_figures(finished, "drift_by_turn", "rebuild_matrix", "drift_by_distance", "drift_by_layer", "drift_in_reply")


def test_the_light_cone_of_a_rebuild_in_place(deep: Model, read: tuple[dict, ...]):
    distance = dict(zip(SHARED, read[0]["distance"].unbind(-1), strict=True))
    assert distance["system"].max() < ROUND_OFF
    for segment, first in {"summary": 1, **dict.fromkeys(SHARED[2:], 2)}.items():
        assert distance[segment][:, :first].max() < ROUND_OFF
        assert distance[segment][:, first:].min() > 10 * ROUND_OFF
    # Keys are compared at equal rotation or not at all.
    kept = deep.prefill(conversation(SHORT[0]).tokens(deep.tokenizer))
    restarted, masked = (deep.apply(policy(SUMMARISED), kept) for policy in (RestartRebuilt, MaskSpans))
    refused(lambda: relative_distance(restarted, masked), "same positions")


def test_every_session_is_eight_turns_with_its_summary_after_the_third():
    assert len({session.id for session in sessions()}) == len(sessions()) == AVAILABLE_SESSIONS
    for session in sessions():
        segments = conversation(session).segments
        assert segments == ("system", *SUMMARISED, "summary", *(f"T{turn}" for turn in range(4, TURNS + 1)))
    refused(lambda: dataclasses.replace(sessions()[0], turns=sessions()[0].turns[:7]), "has 7 turns; give 8")


# ---- made-up measurements

LATER = [ARMS.index(f"rebuilt{turn}") for turn in AFTER]


def filled(values: Callable[[tuple[int, ...]], Any], longest: int = 3) -> dict[str, Any]:
    """A session's tensors with these values wherever a run, turn and token exist; the reply of turn 5 is shorter."""
    starts = np.array([MEASURED[0], MEASURED[0], AFTER[0], *MEASURED])
    runs = starts[:, None] <= np.array(MEASURED)
    there = np.repeat((runs & runs[[ARMS.index(name) for name in REFERENCES], None])[..., None], longest, -1)
    there[:, :, MEASURED.index(5), -1] = False
    early = np.repeat(np.tri(len(AFTER), dtype=bool)[..., None], longest, -1)
    own = np.ones((len(SPEAKERS), len(LISTENERS), len(AFTER), longest), bool)
    shapes = {"kl": there, "agrees": there, "nll": there[0], "own_kl": own, "own_agrees": own, "early_kl": early}
    shapes |= {"early_nll": np.stack([early, early]), "distance": np.ones((2, 4, len(SHARED)), bool)}
    found = {name: np.where(exists, values(exists.shape), np.nan) for name, exists in shapes.items()}
    return found | {name: np.where(np.isnan(found[name]), np.nan, found[name] > 1) for name in ("agrees", "own_agrees")}


def tensors(session: int, drift: float, cost: float, position: float, slope: float) -> dict[str, torch.Tensor]:
    """The rebuilt run is so far from the compacted one, so much worse, and so far from the one rebuilt in place, which
    is 0.3 from the compacted one."""
    found, off = filled(np.zeros), 0.02 * (-1) ** session
    found["kl"][0, LATER] += drift + off
    found["kl"][0, ARMS.index("in_place")] += 0.3 + off
    found["kl"][2, LATER] += position
    found["nll"][LATER] += cost + off
    found["early_kl"] += (
        0.4 + (slope + off / 10) * np.arange(len(AFTER))[:, None] + np.arange(len(AFTER))[:, None, None]
    )
    found["distance"][:, 1:, 1] = found["distance"][:, 2:, 2:] = 0.3
    found["agrees"] += 1
    found["own_agrees"] += 1
    found["own_agrees"][0, LISTENERS.index("rebuilt"), :, session % 3] = 0
    return {name: torch.from_numpy(values) for name, values in found.items()}


def numbers(measured: list[dict[str, torch.Tensor]]) -> Conclusion:
    chat = passages_of(conversation(SHORT[0]), masked=SUMMARISED)
    tables = joined((f"session {number}", tables_of(found)) for number, found in enumerate(measured))
    return concluded(tables, 1e-7, {"chat": [vars(each) for each in chat], "layers": 4, "window": 16})


def made_up(drift: float = 0.5, cost: float = 0.0, position: float = 0.1, slope: float = 0.0) -> Conclusion:
    return numbers([tensors(number, drift, cost, position, slope) for number in range(FEWEST)])


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return Config(sessions=FEWEST), made_up(cost=-0.2, slope=-0.1)


def noise(rng: np.random.Generator) -> Conclusion:
    """All runs are as far from each other and as surprised as the others, however much was read."""
    drawn = [filled(lambda shape: rng.gamma(2.0, size=shape)) for _ in range(AVAILABLE_SESSIONS)]
    return numbers([{name: torch.from_numpy(values) for name, values in found.items()} for found in drawn])


def test_numbers_are_those_that_were_put_in():
    findings = made_up(cost=0.2, slope=-0.25).findings
    expected = {"drift": 0.5, "cost": 0.2, "cause": 0.2}
    assert {name: findings.at(name, turns="back").mean for name in expected} == pytest.approx(expected)
    assert findings.at("by_turn", measure="added", run="rebuilt", turn=5).mean == pytest.approx(0.2)
    # Questions differ by whole nats, and are compared with themselves alone.
    assert findings.at("healing", turns="all").mean == pytest.approx(-0.25)
    assert findings.finding("healing", turns="all").comparisons == 4
    assert findings.at("change").mean == pytest.approx(-0.25 * 2.5)
    keys: Any = {"reference": "compacted", "run": "rebuilt"}
    assert findings.at("own_alike", **keys).mean == pytest.approx(np.mean([number % 3 for number in range(FEWEST)]))
    assert findings.at("own_identical", **keys).mean == 0
    assert findings.at("own_identical", reference="kept", run="kept").mean == 1
    assert findings.at("along", reply="scripted", run="rebuilt", token=3).clusters == FEWEST


DRIFTED = (
    "the rebuilt one drifts: ",
    "not detectably better or worse",
    "what it had seen is the larger",
    "not detectably change",
)
COSTLY = ("does not detectably drift: ", "replies worse than that run", "positions are the larger", "summary it grows")
CHEAP = ("rather than the rebuild's merit", "neither is detectably larger", "summary it shrinks")


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({}, DRIFTED),
        ({"drift": 0.005, "cost": 0.2, "position": 0.5, "slope": 0.1}, COSTLY),
        ({"cost": -0.2, "position": 0.3, "slope": -0.1}, CHEAP),
    ],
)
def test_the_answer_is_decided_by_intervals(changes: dict[str, float], phrases: tuple[str, ...], tmp_path: Path):
    shown = page_of(STUDY, Config(sessions=FEWEST), made_up(**changes), tmp_path)
    said = answer(STUDY, shown)
    assert [phrase for phrase in phrases if phrase not in said] == []
    assert ("fault" in said) == (changes.get("cost", 0) < 0)


def test_controls_fail_where_something_differs_that_cannot():
    measured = [tensors(number, 0.5, 0.0, 0.1, 0.0) for number in range(FEWEST)]
    assert [control.holds for control in numbers(measured).controls] == [True] * 3
    measured[0]["kl"][0, ARMS.index("rebuilt3"), 1, 0] = 1e-3
    measured[1]["kl"][0, ARMS.index("rebuilt4"), MEASURED.index(8)] += 1e-3
    measured[2]["distance"][1, 1, SHARED.index("T7")] = 1e-3
    assert [control.holds for control in numbers(measured).controls] == [False] * 3
