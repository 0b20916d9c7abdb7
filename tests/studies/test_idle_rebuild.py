"""The idle-rebuild study on a tiny model, with shortened sessions: what is shared must equal what is read one by one;
and what made-up measurements decide."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.stats import FEWEST
from kvprobe.studies.idle_rebuild import AVAILABLE_SESSIONS, MEASURED, Config, Removed, removals
from kvprobe.studies.idle_rebuild import collect as collecting
from kvprobe.studies.idle_rebuild.collect import LISTENERS, REFERENCES, SPEAKERS
from kvprobe.studies.idle_rebuild.conclude import conclude
from kvprobe.studies.idle_rebuild.removals import AFTER, REMOVALS
from kvprobe.studies.idle_rebuild.study import STUDY
from kvprobe.tasks.sessions import SUMMARISED, Session, conversation, sessions
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import RestartMode, Transcript
from kvprobe.tidy import Rows, chosen
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.studies.runs import every, whole_run

SHARED = REMOVALS["compaction"].shared
SMALL = Config(sessions=2, continuation=3)
ROUND_OFF = 1e-5
CONE = {"system": 4, "summary": 1, **dict.fromkeys(SHARED[2:], 2)}
"""The first of four layers at which a rebuild in place may change a segment."""


def shortened(session: Session) -> Session:
    """The session with the beginnings of its messages alone, so that a test can read it."""

    def first(text: str, words: int) -> str:
        return " ".join(text.split()[:words])

    turns = tuple(replace(turn, user=first(turn.user, 5), assistant=first(turn.assistant, 6)) for turn in session.turns)
    return replace(session, system=first(session.system, 6), turns=turns, summary=first(session.summary, 10))


SHORT = tuple(map(shortened, sessions()))
CHAT = conversation(SHORT[0])


@pytest.fixture(scope="module")
def read(deep: Model) -> Rows:
    """What is measured of two sessions; the turns 4 to 8 of the first are measured again below, one by one."""
    return pd.concat([collecting.read_session(deep, SMALL, session) for session in SHORT[: SMALL.sessions]])


def values(rows: Rows, column: str, **where: Any) -> torch.Tensor:
    """A column of the first session, token by token."""
    return torch.tensor(chosen(rows, {"sample": SHORT[0].id, **where})[column].to_numpy(float), dtype=torch.float32)


READ: Rows = pd.DataFrame()


def as_read(model: Model, config: Config, session: Session) -> Rows:
    return READ[READ["sample"] == session.id]


@pytest.fixture(scope="module")
def finished(deep: Model, read: Rows, root: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "sessions", lambda: SHORT)
        patch.setattr(collecting, "read_session", as_read)
        patch.setattr(sys.modules[__name__], "READ", read)
        return whole_run(STUDY, SMALL, deep, root, [True, True, True])


def visible(model: Model, turn: int, *unread: str, mode: RestartMode = "contiguous") -> KVCache:
    """The cache of the first session's question at this turn, read with everything before it that can be seen."""
    tokens = CHAT.without(*SUMMARISED, *unread, mode=mode).tokens(model.tokenizer)
    return model.prefill(tokens[: tokens.part(f"reply{turn}").start - 1])


def compacted(model: Model, turn: int) -> KVCache:
    """The same in the compacted run."""
    tokens = CHAT.tokens(model.tokenizer)
    end = tokens.span("summary").stop
    cache = model.prefill(tokens[:end]).mask(*SUMMARISED)
    return model.extend(cache, tokens[end : tokens.part(f"reply{turn}").start - 1])[0]


def logits_along(model: Model, cache: KVCache, turn: int, chat: Transcript = CHAT) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that each token of the scripted reply meets, read token by token; and its surprise."""
    tokens = chat.tokens(model.tokenizer)
    reply, met = tokens.part(f"reply{turn}"), []
    for place in range(reply.start - 1, reply.stop - 1):
        cache, logits = model.extend(cache, tokens[place : place + 1].shifted(int(cache.ledger.following)))
        met.append(logits[0, -1])
    reply_logits = torch.stack(met)
    return reply_logits, -reply_logits.log_softmax(-1)[range(len(met)), list(tokens.ids[reply])]


def test_the_divergence_is_that_of_reading_token_by_token(deep: Model, read: Rows):
    turn = 6
    reference, _ = logits_along(deep, compacted(deep, turn), turn)
    at_once: Any = {"contiguous": ("rebuilt4", "rebuilt6"), "gapped": ("in_place",)}
    for mode, arms in at_once.items():
        logits, surprise = logits_along(deep, visible(deep, turn, mode=mode), turn)
        kl, agrees = divergence(reference, logits)
        assert kl.mean() > 1e-3
        for arm in arms:
            keys = {"reply": "scripted", "turn": turn, "reference": "compacted", "arm": arm}
            torch.testing.assert_close(values(read, "kl", **keys), kl, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(values(read, "nll", **keys), surprise, rtol=1e-3, atol=1e-3)
            assert torch.equal(values(read, "agrees", **keys), agrees.float())


@pytest.mark.parametrize("removed", ["tool_result", "window"])
def test_text_that_left_is_masked_before_the_turn_or_was_never_read(
    deep: Model, removed: Removed, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(removals, "sessions", lambda: SHORT)
    removal, turn = REMOVALS[removed], 6
    config = replace(SMALL, removed=removed, rebuilds=(3, 4, turn))
    rows = collecting.read_session(deep, config, SHORT[0])
    chat = removal.conversation(SHORT[0])
    tokens = chat.tokens(deep.tokenizer)
    end = tokens.part(f"reply{turn}").start - 1

    def hidden(before: int) -> list[int]:
        bare = removed == "tool_result"
        gone = removal.hidden(before)
        return [at for at in range(end) if tokens.segments[at] in gone and not (bare and tokens.delimiters[at])]

    starts = {before: tokens.span(f"T{before}").start for before in range(AFTER[0], turn + 1)}
    running = deep.prefill(tokens[: starts[AFTER[0]]])
    for before, stop in zip(starts, (*list(starts.values())[1:], end), strict=True):
        running, _ = deep.extend(running.mask(slots=hidden(before)), tokens[starts[before] : stop])
    fresh = deep.prefill(Tokens.of([tokens.ids[at] for at in range(end) if at not in hidden(turn)]))
    (logits, _), (others, surprise) = (logits_along(deep, cache, turn, chat) for cache in (running, fresh))
    kl, _ = divergence(logits, others)
    keys: Any = {"reply": "scripted", "turn": turn, "reference": "compacted"}
    assert kl.mean() > 1e-3
    torch.testing.assert_close(values(rows, "kl", arm=f"rebuilt{turn}", **keys), kl, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(values(rows, "nll", arm=f"rebuilt{turn}", **keys), surprise, rtol=1e-3, atol=1e-3)
    assert values(rows, "kl", arm="rebuilt3", **keys).max() < ROUND_OFF
    for segment, first in {"system": 4, **dict.fromkeys(removal.saw, 1), **dict.fromkeys(removal.later, 2)}.items():
        distance = values(rows, "distance", segment=segment).reshape(2, 4)
        assert distance[:, :first].max() < ROUND_OFF
        assert (distance[:, first:] > 10 * ROUND_OFF).all()


def test_a_question_put_early_is_the_session_without_the_turns_between(deep: Model, read: Rows):
    _, surprise = logits_along(deep, visible(deep, 7, "T5", "T6"), 7)
    keys: Any = {"turn": 7, "reference": "compacted"}
    early = values(read, "nll", reply="early", arm="rebuilt", read=1, **keys)
    torch.testing.assert_close(early, surprise, rtol=1e-3, atol=1e-3)
    # Put where it belongs, it is the session itself.
    own_place = values(read, "kl", reply="early", arm="rebuilt", read=3, **keys)
    assert torch.equal(own_place, values(read, "kl", reply="scripted", arm="rebuilt7", **keys))


def test_the_tokens_before_the_first_difference_are_those_that_both_would_say(deep: Model, read: Rows):
    tokens, turn = CHAT.tokens(deep.tokenizer), 6
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
    own_replies = chosen(collecting.tables_of(read)["samples"], {"sample": SHORT[0].id, "reply": "own"})
    compared = chosen(own_replies, {"turn": turn, "reference": "compacted", "arm": "rebuilt"})
    assert compared["alike"].tolist() == [same.index(False)]
    assert set(own_replies.loc[own_replies["arm"] == own_replies["reference"], "agrees"]) == {1.0}


def test_a_run_compares_a_rebuilt_cache_with_the_compacted_one(finished: Run):
    conclusion = Conclusion.of(finished.metrics)
    assert "2 sessions are too few to tell" in conclusion.warnings[0]
    keys: Any = {"turns": "all", "reference": "compacted"}
    assert conclusion.findings.at("kl", run="rebuilt", **keys).smallest > 100 * ROUND_OFF
    assert conclusion.findings.at("kl", run="compacted", **keys).largest < ROUND_OFF


def test_the_light_cone_of_a_rebuild_in_place(read: Rows):
    for segment, first in CONE.items():
        distance = values(read, "distance", segment=segment).reshape(2, 4)
        assert distance[:, :first].max() < ROUND_OFF
        assert (distance[:, first:] > 10 * ROUND_OFF).all()


FIRST = {"in_place": AFTER[0]} | {f"rebuilt{turn}": turn for turn in MEASURED}
"""The first turn of runs that are not there from the beginning."""
ARMS = ("kept", "compacted", *FIRST)
SCRIPTED = every(turn=MEASURED, reference=REFERENCES, arm=ARMS, token=(1, 2, 3)).assign(reply="scripted")
OWN = every(turn=AFTER, reference=SPEAKERS, arm=LISTENERS, token=(1, 2, 3)).assign(reply="own")
EARLY = every(turn=AFTER, read=range(len(AFTER)), arm=("compacted", "rebuilt"), token=(1, 2, 3)).assign(reply="early")
STARTED = SCRIPTED[["reference", "arm"]].map(lambda name: FIRST.get(name, 0)).max(axis=1)
SHORTER = (SCRIPTED["turn"] == 5) & (SCRIPTED["token"] == 3)
ASKED = EARLY[EARLY["read"] <= EARLY["turn"] - AFTER[0]].assign(reference="compacted")
TOKENS = pd.concat([SCRIPTED[(SCRIPTED["turn"] >= STARTED) & ~SHORTER], OWN, ASKED], ignore_index=True)
TOKENS = TOKENS.assign(kl=0.0, agrees=1.0, nll=0.0)
TOKENS["read"] = TOKENS["read"].fillna(TOKENS["turn"] - AFTER[0]).astype(int)
LAYERS = every(family=("k", "v"), layer=range(4), segment=SHARED)


def measured(session: int, drift: float, cost: float, position: float, slope: float) -> Rows:
    """The rebuilt run is so far from the compacted one, so much worse, and so far from the one rebuilt in place, which
    is 0.3 from the compacted one."""
    rows, off = TOKENS.copy(), 0.02 * (-1) ** session
    scripted, early, own = (rows["reply"] == reply for reply in ("scripted", "early", "own"))
    later = scripted & rows["arm"].isin([f"rebuilt{turn}" for turn in AFTER])
    rows.loc[later & (rows["reference"] == "compacted"), "kl"] = drift + off
    rows.loc[scripted & (rows["arm"] == "in_place") & (rows["reference"] == "compacted"), "kl"] = 0.3 + off
    rows.loc[later & (rows["reference"] == "in_place"), "kl"] = position
    rows.loc[later, "nll"] = cost + off
    rows.loc[early, "kl"] = rows["turn"] + (slope + off / 10) * rows["read"]
    said = own & (rows["reference"] == "compacted") & (rows["arm"] == "rebuilt")
    rows.loc[said & (rows["token"] == 1 + session % 3), "agrees"] = 0.0
    differ = LAYERS["layer"] >= LAYERS["segment"].map(CONE)
    return pd.concat([rows, LAYERS.assign(distance=0.3 * differ)], ignore_index=True)


def numbers(sessions: Sequence[Rows], removed: Removed = "compaction") -> Conclusion:
    rows = pd.concat([rows.assign(sample=f"session {number}") for number, rows in enumerate(sessions)])
    conclusion = conclude(collecting.tables_of(rows), Config(removed=removed), any_model())
    return replace(conclusion, facts={**conclusion.facts, "window": 16})


def made_up(
    drift: float = 0.5, cost: float = 0.0, position: float = 0.1, slope: float = 0.0, removed: Removed = "compaction"
) -> Conclusion:
    return numbers([measured(number, drift, cost, position, slope) for number in range(FEWEST)], removed)


def example() -> tuple[Config, Conclusion]:
    return Config(sessions=FEWEST), made_up(cost=-0.2, slope=-0.1)


def noise(rng: np.random.Generator) -> Conclusion:
    """All runs are as far from each other and as surprised as the others, however much was read."""
    drawn = []
    for _ in range(AVAILABLE_SESSIONS):
        random = dict(zip(("kl", "nll"), rng.gamma(2.0, size=(2, len(TOKENS))), strict=True))
        drawn.append(pd.concat([TOKENS.assign(**random), LAYERS.assign(distance=0.0)], ignore_index=True))
    return numbers(drawn)


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


DRIFTED = ("rebuilt one drifts: ", "not detectably better or worse", "had seen is the larger", "not detectably change")
COSTLY = ("does not detectably drift: ", "replies worse than that run", "positions are the larger", "turn 3 it grows")
CHEAP = ("rather than the rebuild's merit", "neither is detectably larger", "turn 3 it shrinks")


@pytest.mark.parametrize(
    ("removed", "changes", "phrases"),
    [
        ("compaction", {}, DRIFTED),
        ("tool_result", {"drift": 0.005, "cost": 0.2, "position": 0.5, "slope": 0.1}, COSTLY),
        ("window", {"cost": -0.2, "position": 0.3, "slope": -0.1}, CHEAP),
    ],
)
def test_the_answer_is_decided_by_intervals(
    removed: Removed, changes: dict[str, float], phrases: tuple[str, ...], tmp_path: Path
):
    config = Config(sessions=FEWEST, removed=removed)
    said = answer_of(STUDY, config, made_up(**changes, removed=removed), tmp_path)
    assert [phrase for phrase in phrases if phrase not in said] == []
    assert ("fault" in said) == (changes.get("cost", 0) < 0)


def test_controls_fail_where_something_differs_that_cannot():
    sound = [measured(number, 0.5, 0.0, 0.1, 0.0) for number in range(FEWEST)]
    assert [control.holds for control in numbers(sound).controls] == [True] * 3
    compacted = (sound[0]["reply"] == "scripted") & (sound[0]["reference"] == "compacted")
    sound[1].loc[compacted & (sound[1]["arm"] == "rebuilt4") & (sound[1]["turn"] == 8), "kl"] += 1e-3
    # A window moves on, and what was rebuilt earlier has seen more.
    assert [control.holds for control in numbers(sound, "window").controls] == [True] * 2
    sound[0].loc[compacted & (sound[0]["arm"] == "rebuilt3") & (sound[0]["turn"] == 6), "kl"] = 1e-3
    sound[2].loc[(sound[2]["segment"] == "T7") & (sound[2]["layer"] == 1), "distance"] = 1e-3
    assert [control.holds for control in numbers(sound).controls] == [False] * 3
