"""The idle-rebuild study on real weights, with shortened sessions: what is shared must equal what is read one by
one."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import kvprobe.studies.idle_rebuild.study as study
from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.policies import MaskSpans, RestartInPlace, RestartRebuilt
from kvprobe.studies.idle_rebuild import collect as collecting
from kvprobe.studies.idle_rebuild.analyse import SHOWN, Collected, _said_alike, _slope
from kvprobe.studies.idle_rebuild.collect import (
    AFTER,
    ARMS,
    LISTENERS,
    MEASURED,
    SHARED,
    SPEAKERS,
    read_session,
    rebuilt,
    relative_distance,
)
from kvprobe.studies.idle_rebuild.config import AVAILABLE_SESSIONS, Config
from kvprobe.studies.idle_rebuild.narrative import (
    _controls_section,
    answer_cause,
    answer_drift,
    answer_healing,
    answer_worse,
)
from kvprobe.tasks.sessions import SUMMARISED, TURNS, Session, conversation, sessions
from tests.refusals import refused
from tests.studies.runs import about, assert_figures, give, interrupted

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
def read(smol: Model) -> tuple[dict[str, torch.Tensor], ...]:
    """What is measured of two sessions; the turns 4 to 8 of the first are measured again below, one by one."""
    return tuple(read_session(smol, session, SMALL.continuation) for session in SHORT[: SMALL.sessions])


@pytest.fixture(scope="module")
def finished(smol: Model, read: tuple[dict[str, torch.Tensor], ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        give(patch, smol)
        patch.setattr(collecting, "sessions", lambda: SHORT)
        patch.setattr(collecting, "read_session", lambda _, session, __: read[SHORT.index(session)])
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


def compacted(model: Model, turn: int) -> KVCache:
    """The compacted cache of the first session, its question at this turn read: message by message, in one row."""
    tokens = conversation(SHORT[0]).tokens(model.tokenizer)
    cache = model.prefill(tokens[: tokens.span("summary").stop]).mask(*SUMMARISED)
    for between in range(AFTER[0], turn):
        cache, _ = model.extend(cache, tokens[tokens.span(f"T{between}")])
    cache, _ = model.extend(cache, tokens[tokens.span(f"T{turn}").start : tokens.part(f"reply{turn}").start - 1])
    return cache


def visible(model: Model, turn: int, *unread: str, mode: str = "contiguous") -> KVCache:
    """The same question, read with everything before it that can be seen as one text."""
    chat = conversation(SHORT[0]).without(*SUMMARISED, *unread, mode=mode)
    tokens = chat.tokens(model.tokenizer)
    return model.prefill(tokens[: tokens.part(f"reply{turn}").start - 1])


def logits_along(model: Model, cache: KVCache, turn: int) -> torch.Tensor:
    """The logits that each token of the scripted reply meets, which is read token by token."""
    tokens = conversation(SHORT[0]).tokens(model.tokenizer)
    reply, met = tokens.part(f"reply{turn}"), []
    for place in range(reply.start - 1, reply.stop - 1):
        following = int(cache.ledger.following)
        cache, logits = model.extend(cache, tokens[place : place + 1].shifted(following))
        met.append(logits[0, -1])
    return torch.stack(met)


def reply_ids(model: Model, turn: int) -> list[int]:
    tokens = conversation(SHORT[0]).tokens(model.tokenizer)
    return list(tokens.ids[tokens.part(f"reply{turn}")])


@pytest.mark.parametrize("turn", [4, 7])
@pytest.mark.parametrize(("policy", "mode"), [(RestartRebuilt, "contiguous"), (RestartInPlace, "gapped")])
def test_a_rebuild_is_a_prefill_of_the_conversation_without_the_hidden_turns(
    smol: Model, turn: int, policy: type[MaskSpans], mode: str
):
    tokens = conversation(SHORT[0]).tokens(smol.tokenizer)
    chat = conversation(SHORT[0]).without(*SUMMARISED, mode=mode)
    fresh = chat.tokens(smol.tokenizer)
    expected = smol.prefill(fresh[: fresh.span(f"T{turn}").start])
    kept = smol.prefill(tokens[: tokens.span(f"T{turn}").start])
    # Whether the cache to be dropped was compacted does not matter: only its text is read.
    for start in (kept, smol.apply(MaskSpans(SUMMARISED), kept)):
        found = smol.apply(policy(SUMMARISED), start)
        assert torch.equal(found.ledger.positions, expected.ledger.positions)
        assert torch.equal(found.ledger.tokens, expected.ledger.tokens)
        for one, other in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=ROUND_OFF * float(other.abs().max()))
    if policy is RestartRebuilt:
        again = rebuilt(smol, tokens, kept, turn)
        torch.testing.assert_close(again.keys[-1], found.keys[-1], rtol=0, atol=1e-4)


def test_the_divergence_is_that_of_reading_token_by_token(smol: Model, read: tuple[dict, ...]):
    turn = 6
    reply, column = reply_ids(smol, turn), MEASURED.index(turn)
    reference = logits_along(smol, compacted(smol, turn), turn)
    for arms, mode in (((f"rebuilt{AFTER[0]}", f"rebuilt{turn}"), "contiguous"), (("in_place",), "gapped")):
        logits = logits_along(smol, visible(smol, turn, mode=mode), turn)
        kl, agrees = divergence(reference, logits)
        surprise = -logits.log_softmax(-1)[range(len(reply)), reply]
        assert kl.mean() > 1e-3
        for arm in arms:
            place = (ARMS.index(arm), column, slice(len(reply)))
            torch.testing.assert_close(read[0]["kl"][(0, *place)], kl, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(read[0]["nll"][place], surprise, rtol=1e-3, atol=1e-3)
            assert torch.equal(read[0]["agrees"][(0, *place)], agrees.float())
            assert read[0]["kl"][0, ARMS.index(arm), column, len(reply) :].isnan().all()


def test_a_question_put_early_is_the_session_without_the_turns_between(smol: Model, read: tuple[dict, ...]):
    reply = reply_ids(smol, 7)
    logits = logits_along(smol, visible(smol, 7, "T5", "T6"), 7)
    surprise = -logits.log_softmax(-1)[range(len(reply)), reply]
    place = (AFTER.index(7), 1, slice(len(reply)))
    torch.testing.assert_close(read[0]["early_nll"][(1, *place)], surprise, rtol=1e-3, atol=1e-3)
    # Put where it belongs, it is the session itself.
    own_place = read[0]["early_kl"][AFTER.index(7), AFTER.index(7)]
    torch.testing.assert_close(
        own_place, read[0]["kl"][0, ARMS.index("rebuilt7"), MEASURED.index(7)], rtol=0, atol=0, equal_nan=True
    )


def test_the_tokens_before_the_first_difference_are_those_that_both_would_say(smol: Model, read: tuple[dict, ...]):
    alike = _said_alike(read[0]["own_agrees"].double().numpy())
    tokens = conversation(SHORT[0]).tokens(smol.tokenizer)
    turn = 6
    last = tokens[tokens.part(f"reply{turn}").start - 1 :][:1]
    said = []
    for cache in (compacted(smol, turn), visible(smol, turn)):
        ids = []
        asked = last.shifted(int(cache.ledger.following))
        for _ in range(SMALL.continuation):
            cache, logits = smol.extend(cache, asked)
            ids.append(int(logits[0, -1].argmax()))
            asked = type(last).of(ids[-1:], "own", int(cache.ledger.following))
        said.append(ids)
    same = [one == other for one, other in zip(*said, strict=True)]
    found = alike[SPEAKERS.index("compacted"), LISTENERS.index("rebuilt"), AFTER.index(turn)]
    assert found == (same.index(False) if False in same else len(same))
    for row, speaker in enumerate(SPEAKERS):
        assert np.nanmin(read[0]["own_agrees"][row, LISTENERS.index(speaker)]) == 1


def test_before_the_compaction_there_is_nothing_to_lose(finished: Run):
    controls = finished.metrics["controls"]
    assert controls["rebuilt_before_compaction"] < ROUND_OFF
    assert controls["rebuilt_before_compaction_from_kept"] < ROUND_OFF
    assert controls["before_compaction_agreement"] == 1
    assert controls["whenever"] < ROUND_OFF
    drift = finished.metrics["drift"]["all"]
    assert drift["kl_from_compacted"]["rebuilt"]["smallest"] > 100 * ROUND_OFF
    assert drift["kl_from_compacted"]["compacted"]["largest"] < ROUND_OFF
    assert drift["kl_from_kept"]["kept"]["largest"] < ROUND_OFF


def test_the_light_cone_of_a_rebuild_in_place(smol: Model, read: tuple[dict, ...]):
    distance = dict(zip(SHARED, read[0]["distance"].unbind(-1), strict=True))
    assert distance["system"].max() < ROUND_OFF
    assert distance["summary"][:, 0].max() < ROUND_OFF
    assert distance["summary"][:, 1:].min() > 100 * ROUND_OFF
    for turn in AFTER:
        assert distance[f"T{turn}"][:, :2].max() < ROUND_OFF
        assert distance[f"T{turn}"][:, 2:].min() > 10 * ROUND_OFF
    # Keys are compared at equal rotation or not at all.
    tokens = conversation(SHORT[0]).tokens(smol.tokenizer)
    kept = smol.prefill(tokens)
    refused(
        lambda: relative_distance(
            smol.apply(RestartRebuilt(SUMMARISED), kept), smol.apply(MaskSpans(SUMMARISED), kept)
        ),
        "same positions",
    )


def test_a_run_holds_every_table_number_and_figure(finished: Run):
    assert finished.finished
    samples = finished.df()
    assert set(samples["measure"]) == {"scripted reply", "own reply of the reference", "asked early"}
    own = samples[samples["measure"] == "own reply of the reference"]
    assert len(own) == SMALL.sessions * len(SPEAKERS) * len(LISTENERS) * len(AFTER)
    early = samples[samples["measure"] == "asked early"]
    assert len(early) == SMALL.sessions * len(AFTER) * (len(AFTER) + 1) // 2
    tokens = finished.df("tokens")
    assert set(tokens["condition"]) == set(SHOWN)
    assert not tokens[["kl", "agrees", "nll"]].isna().any().any()
    layers = finished.df("layers")
    assert len(layers) == 2 * 30 * len(SHARED)
    assert layers[["low", "high"]].isna().all(axis=None), "two sessions are too few for an interval"
    metrics = finished.metrics
    assert {row: list(cells) for row, cells in metrics["matrix"].items()} == {
        f"rebuilt{before}": [str(turn) for turn in MEASURED if turn >= before] for before in MEASURED
    }
    assert "2 sessions are too few for an interval" in finished.report["warnings"][0]
    # Means in the metrics are those of the table.
    mine = samples.query("measure == 'scripted reply' and condition == 'rebuilt' and reference == 'compacted'")
    assert mine["kl"].mean() == pytest.approx(metrics["drift"]["all"]["kl_from_compacted"]["rebuilt"]["mean"])
    assert_figures(finished, "drift_by_turn", "rebuild_matrix", "drift_by_distance", "drift_by_layer", "drift_in_reply")


def test_the_reports_maps_are_the_distances_by_layer_and_segment(finished: Run):
    (section,) = [each for each in finished.report["sections"] if each["title"] == "Where in the cache"]
    layers = finished.df("layers")
    for family, found in zip("kv", section["maps"], strict=True):
        assert found["caption"].startswith(family.upper())
        assert found["columns"] == ["summary", *(f"T{turn}" for turn in AFTER)]
        assert found["rows"] == [str(layer) for layer in range(30)]
        for place, segment in enumerate(found["columns"]):
            own = layers[(layers["family"] == family) & (layers["segment"] == segment)].sort_values("layer")
            assert [row[place] for row in found["values"]] == own["distance"].tolist()


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    tiny_llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    give(monkeypatch, tiny_llama)
    monkeypatch.setattr(collecting, "sessions", lambda: SHORT)
    whole = study.run(SMALL, tmp_path / "whole")
    run = partial(study.run, SMALL, tmp_path / "stopped")
    resumed, calls = interrupted(run, monkeypatch, collecting, "read_session", at=2)
    assert len(calls) == 2 + 1
    assert json.dumps(resumed.metrics) == json.dumps(whole.metrics)


def test_sessions_with_longer_replies_are_joined_without_losing_a_token(tmp_path: Path):
    paths = []
    for index, length in enumerate((2, 3)):
        paths.append(tmp_path / f"{index}.safetensors")
        save_file({"nll": torch.ones(1, length)}, paths[-1])
    joined = Collected.load(paths).measured["nll"]
    assert joined.shape == (2, 1, 3)
    assert np.isnan(joined[0, 0]).tolist() == [False, False, True]


def test_healing_compares_each_question_with_itself_alone():
    offsets, read = np.array([9.0, 1.0, 5.0])[:, None], np.arange(3)
    values = np.where(read <= np.arange(3)[:, None], offsets - 0.25 * read, np.nan)
    np.testing.assert_allclose(_slope(np.stack([values, values + 7])), [-0.25, -0.25])


def test_what_was_said_alike_ends_at_the_first_difference_or_with_the_reply():
    agrees = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, np.nan, np.nan], [1, 1, 1, 1]])
    assert _said_alike(agrees).tolist() == [2, 0, 2, 4]


def test_every_session_is_eight_turns_with_its_summary_after_the_third():
    assert len(sessions()) == AVAILABLE_SESSIONS
    assert len({session.id for session in sessions()}) == AVAILABLE_SESSIONS
    for session in sessions():
        segments = conversation(session).segments
        assert segments == ("system", *SUMMARISED, "summary", *(f"T{turn}" for turn in range(4, TURNS + 1)))
    refused(lambda: dataclasses.replace(sessions()[0], turns=sessions()[0].turns[:7]), "has 7 turns; give 8")


def metrics_with(
    drift: float = 0.5, loss: float = 0.0, over: float = 0.0, slope: float = 0.0, whenever: float = 0.0
) -> dict:
    """Metrics whose differences are these, each give or take 0.1."""

    runs = dict.fromkeys(SHOWN, about(0.5))
    return {
        "precision": 1e-7,
        "drift": {
            "all": {
                "kl_from_compacted": runs,
                "agreement": runs,
                "over_control": about(drift),
                "position": about(0.1),
                "provenance_over_position": about(over),
                "nll_difference": {"rebuilt - compacted": about(loss), "compacted - kept": about(0.2)},
            }
        },
        "healing": {"slope": about(slope), "right_after": about(0.3), "at_its_place": about(0.1)},
        "controls": {"whenever": whenever},
    }


@pytest.mark.parametrize(("drift", "start"), [(0.5, "The rebuilt run drifts: "), (0.05, "No drift of the rebuilt")])
def test_the_sentence_on_drift_follows_the_interval(drift: float, start: str):
    assert answer_drift(metrics_with(drift=drift)).startswith(start)


@pytest.mark.parametrize(
    ("loss", "start"),
    [(0.5, "The rebuild costs: "), (-0.5, "The rebuild does not cost, it helps: "), (0.0, "Neither a cost nor a gain")],
)
def test_the_sentence_on_cost_follows_the_interval(loss: float, start: str):
    sentence = answer_worse(metrics_with(loss=loss))
    assert sentence.startswith(start)
    assert ("fault" in sentence) == (loss < 0)


@pytest.mark.parametrize(
    ("over", "words"),
    [(0.5, "had seen than of positions"), (-0.5, "of positions than of"), (0.0, "are indistinguishable")],
)
def test_the_sentence_on_the_cause_follows_the_interval(over: float, words: str):
    assert words in answer_cause(metrics_with(over=over))


@pytest.mark.parametrize(
    ("slope", "start"),
    [
        (-0.5, "The drift heals"),
        (0.5, "The drift grows"),
        (0.0, "That the drift heals or grows as turns arrive was not"),
    ],
)
def test_the_sentence_on_healing_follows_the_interval(slope: float, start: str):
    assert answer_healing(metrics_with(slope=slope)).startswith(start)


def test_that_the_moment_of_the_rebuild_makes_no_difference_is_said_only_if_it_was_found():
    assert "makes no difference" in answer_healing(metrics_with(whenever=1e-6))
    assert "makes no difference" not in answer_healing(metrics_with(whenever=1e-3))


def test_the_report_doubts_a_run_whose_controls_fail(finished: Run):
    metrics = finished.metrics
    assert sum("The control holds." in point for point in _controls_section(metrics).points) == 3
    metrics["controls"] |= {"rebuilt_before_compaction": 1e-3, "turns_layers_0_1": 1e-3}
    assert sum("DOES NOT HOLD" in point for point in _controls_section(metrics).points) == 2
