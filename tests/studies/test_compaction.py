"""The compaction study on real weights, small: every arm must be what its name says."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvprobe.studies.compaction.study as study
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.features import read_outs
from kvprobe.studies.compaction import collect as collecting
from kvprobe.studies.compaction.analyse import OUTCOMES
from kvprobe.studies.compaction.arms import (
    ARMS,
    CONTRASTS,
    HIDDEN_SEGMENTS,
    MASK,
    RECOMPUTED,
    RESTART,
    RETAINED,
    contrast,
)
from kvprobe.studies.compaction.collect import CALIBRATION, CONDITIONS, irrelevant, read_context
from kvprobe.studies.compaction.config import Config
from kvprobe.studies.compaction.narrative import answer_code, answer_distance, answer_factors, answer_questions
from kvprobe.tasks.compaction import KINDS, compacted_conversation, compactions
from kvprobe.tasks.passcode import contexts
from tests.studies.runs import about, assert_figures, give, interrupted

SMALL = Config(contexts=3, samples=30, folds=3, continuation=4, answer=3, batch=7)
ANSWERING = dataclasses.replace(SMALL, answer=8)
CODES = ("48213", "90577", "13662")


@pytest.fixture(scope="module")
def read(smol: Model) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    return read_context(smol, contexts()[0], compactions()[0], contexts()[1:], CODES, ANSWERING)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """What `read_context` gave for each context of the run."""
    return {}


@pytest.fixture(scope="module")
def finished(smol: Model, measured: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    def read_and_remember(model: Model, context: Any, *others: Any) -> Any:
        measured[context.id] = read_context(model, context, *others)
        return measured[context.id]

    with pytest.MonkeyPatch.context() as patch:
        give(patch, smol)
        patch.setattr(collecting, "read_context", read_and_remember)
        return study.run(SMALL, tmp_path_factory.mktemp("runs"))


def test_the_answers_are_where_the_questions_say_they_are():
    for context, compaction in zip(contexts(), compactions(), strict=True):
        hidden = " ".join([context.chat_user, context.chat_assistant, context.secret_user, context.secret_assistant])
        summaries = f"{context.summary_1} {context.summary_2}".lower()
        spoken = (context.system, context.ask_summary_1, context.ask_summary_2, context.question, context.answer)
        seen = " ".join((summaries, *spoken, compaction.followup_user, compaction.followup_assistant)).lower()
        assert compaction.summary_answer.lower() in summaries, context.id
        assert compaction.hidden_answer.lower() in hidden.lower(), context.id
        assert compaction.hidden_answer.lower() not in seen, context.id
        for kind in KINDS:
            words = compaction.answer(kind)
            assert words is None or words.lower() not in compaction.question(kind).lower(), context.id
    assert len({compaction.id for compaction in compactions()}) == len(contexts())


def test_the_arms_are_every_combination_and_the_pair_differs_in_provenance_alone():
    assert len(set(ARMS)) == 8
    assert set(RETAINED) | set(RECOMPUTED) == set(ARMS)
    assert dataclasses.replace(MASK, provenance="recomputed") == RESTART


def test_contrasts_recover_planted_effects_and_nothing_else():
    names = [" × ".join(factors) for factors in CONTRASTS]
    planted = dict(zip(names, [0.4, -0.2, 0.1, 0.03, 0.0, -0.05, 0.02], strict=True))
    signs = {" × ".join(factors): np.sign(contrast(factors)) for factors in CONTRASTS}
    outcome = 5.0 + sum(planted[name] / 2 * signs[name] for name in names)
    found = {" × ".join(factors): float(outcome @ np.array(contrast(factors))) for factors in CONTRASTS}
    for name in names:
        assert found[name] == pytest.approx(planted[name], abs=1e-12)


def by_hand(smol: Model, arm: Any, code: str) -> tuple[Any, Any]:
    """The cache of an arm made without policies, and the tokens of the whole conversation."""
    chat = compacted_conversation(contexts()[0], compactions()[0], code)
    tokens = chat.tokens(smol.tokenizer)
    third = tokens.span("T3").start
    hidden = torch.tensor([[segment in HIDDEN_SEGMENTS for segment in tokens.segments[:third]]])
    if arm.delimiters == "kept":
        hidden &= ~torch.tensor([tokens.delimiters[:third]])
    if arm.provenance == "retained":
        cache = smol.prefill(tokens[:third]).evict(slots=hidden)
        return cache.reindex(arm.mode), tokens
    kept = [index for index in range(third) if not hidden[0, index]]
    positions = kept if arm.mode == "gapped" else list(range(len(kept)))
    again = dataclasses.replace(
        tokens,
        **{
            name: tuple(getattr(tokens, name)[index] for index in kept)
            for name in ("ids", "segments", "parts", "recomputed", "delimiters")
        },
        positions=tuple(positions),
        end=third if arm.mode == "gapped" else None,
    )
    return smol.prefill(again), tokens


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_says_of_the_code_what_its_cache_made_by_hand_says(
    smol: Model, read: tuple[dict[str, torch.Tensor], Any], arm: Any
):
    cache, tokens = by_hand(smol, arm, CODES[1])
    third, answer = tokens.span("T3").start, tokens.part("answer")
    start = int(cache.ledger.following[0])
    _, logits = smol.extend(cache, tokens[third : answer.stop - 1].shifted(start), logits=5)
    scores = logits[0].log_softmax(-1)
    expected = scores[torch.arange(5), torch.tensor(tokens.ids[answer])]
    found = read[0]["logprob"][1, 1 + ARMS.index(arm)]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arm", [MASK, RETAINED[3], RESTART], ids=lambda arm: arm.name)
def test_what_the_probes_see_is_t3_under_that_arm(smol: Model, read: tuple[dict[str, torch.Tensor], Any], arm: Any):
    cache, tokens = by_hand(smol, arm, CODES[0])
    turn = tokens[tokens.span("T3").start : tokens.span("ask").start].shifted(int(cache.ledger.following[0]))
    captured = smol.capture(turn, ["k", "v"], past=cache)
    for family in ("k", "v"):
        expected = read_outs(captured.stack(family))[0]
        found = read[0][f"{arm.name}.{family}"][0]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_the_distance_from_the_full_context_is_that_of_reading_its_reply_under_the_arm(
    smol: Model, read: tuple[dict[str, torch.Tensor], Any]
):
    arm = RETAINED[2]
    cache, tokens = by_hand(smol, arm, CODES[0])
    third = tokens.span("T3").start
    turn = tokens[third : tokens.part("reply").start]
    full, logits = smol.extend(smol.prefill(tokens[:third]), turn)
    cache, other = smol.extend(cache, turn.shifted(int(cache.ledger.following[0])))
    for step in range(SMALL.continuation):
        scores, others = logits[0, -1].log_softmax(-1), other[0, -1].log_softmax(-1)
        expected = (scores.exp() * (scores - others)).sum()
        place = CONDITIONS.index(arm.name)
        torch.testing.assert_close(read[0]["kl"][place, step], expected, rtol=1e-2, atol=1e-4)
        token = dataclasses.replace(turn[:1], ids=(int(scores.argmax()),), end=None)
        full, logits = smol.extend(full, token.shifted(int(full.ledger.following[0])))
        cache, other = smol.extend(cache, token.shifted(int(cache.ledger.following[0])))


@pytest.mark.parametrize("arm", [MASK, RETAINED[3], RESTART, RECOMPUTED[3]], ids=lambda arm: arm.name)
def test_the_answers_of_an_arm_are_those_that_its_cache_made_by_hand_gives_alone(
    smol: Model, read: tuple[dict[str, torch.Tensor], dict[str, list[str]]], arm: Any
):
    cache, tokens = by_hand(smol, arm, CODES[0])
    turn = tokens[tokens.span("T3").start : tokens.span("ask").start]
    cache, _ = smol.extend(cache, turn.shifted(int(cache.ledger.following[0])))
    full, _ = smol.extend(smol.prefill(tokens[: tokens.span("T3").start]), turn)
    place = CONDITIONS.index(arm.name)
    for number, kind in enumerate(KINDS):
        question = compactions()[0].question(kind)
        alone, whole = (smol.generate(start, question, max_new_tokens=ANSWERING.answer) for start in (cache, full))
        assert read[1][arm.name][number] == alone.text
        assert read[1]["full"][number] == whole.text
        assert read[0]["same"][place, number] == (alone.tokens == whole.tokens)
        words = compactions()[0].answer(kind)
        if words is not None:
            assert read[0]["right"][place, number] == (words.lower() in alone.text.lower())


def test_every_full_context_is_no_distance_from_itself(read: tuple[dict[str, torch.Tensor], Any]):
    for condition in ("full", CALIBRATION[0]):
        place = CONDITIONS.index(condition)
        assert read[0]["kl"][place].nan_to_num().max() < 1e-5
        assert (read[0]["same"][place] == 1).all()
        assert (read[0]["prefix"][place] == 1).all()
    assert (read[0]["kl"][CONDITIONS.index(MASK.name)].nan_to_num().sum()) > 0.01


def test_attention_is_shared_out_whole_and_none_of_it_goes_to_what_is_hidden(read: tuple[dict[str, torch.Tensor], Any]):
    attention = read[0]["attention"]
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]), rtol=0, atol=1e-5)
    hidden = collecting.LOOKED_AT.index("hidden turns")
    assert (attention[1:, ..., hidden] == 0).all()
    assert attention[0, ..., hidden].mean() > 0.05
    # At layer 0 nothing but positions and tokens counts, so masking and restarting look alike there.
    torch.testing.assert_close(attention[1, 0], attention[2, 0], rtol=0, atol=1e-5)


def test_the_irrelevant_block_changes_the_hidden_text_and_nothing_else(smol: Model):
    tokens = compacted_conversation(contexts()[0], compactions()[0], CODES[0]).tokens(smol.tokenizer)
    other = irrelevant(smol, tokens, contexts()[1:])
    assert dataclasses.replace(other, ids=tokens.ids) == tokens
    for index, (own, changed) in enumerate(zip(tokens.ids, other.ids, strict=True)):
        if tokens.segments[index] not in HIDDEN_SEGMENTS or tokens.delimiters[index]:
            assert own == changed
    hidden = [i for i, s in enumerate(tokens.segments) if s in HIDDEN_SEGMENTS and not tokens.delimiters[i]]
    assert np.mean([tokens.ids[index] != other.ids[index] for index in hidden]) > 0.9


def test_the_code_does_not_reach_the_first_layers_of_retained_arms(finished: Run):
    assert finished.metrics["light_cone"]["layers_0_1"] < 1e-5
    assert finished.metrics["light_cone"]["last_layer"] > 1e-4


def test_a_run_holds_every_number_table_and_figure(finished: Run):
    assert len(finished.df()) == 30 * (1 + len(ARMS))
    assert len(finished.df("conversations")) == 3 * len(CONDITIONS)
    for arm in ARMS:
        assert set(finished.metrics["arms"][arm.name]) == set(OUTCOMES)
    assert {len(effects) for effects in finished.metrics["effects"].values()} == {len(CONTRASTS)}
    assert_figures(finished, "arms", "effects", "dangling")
    mean = finished.metrics["mask_minus_restart"]["kl"]["mean"]
    table = finished.df("conversations").groupby("condition")["kl"].mean()
    assert mean == pytest.approx(table[MASK.name] - table[RESTART.name], abs=1e-6)


def test_the_reports_maps_are_what_each_head_spends_and_where_it_goes(finished: Run):
    (section,) = [each for each in finished.report["sections"] if each["title"] == "Dangling attention"]
    spent, went = section["maps"]
    measured = finished.metrics["dangling"]
    assert (spent["row_axis"], spent["column_axis"], spent["values"]) == ("layer", "head", measured["by_head"])
    assert np.mean(spent["values"], 1) == pytest.approx(measured["by_layer"])
    for place, name in enumerate(went["columns"]):
        assert [row[place] for row in went["values"]] == measured["went_by_layer"][name]
    assert np.sum(went["values"], 1) == pytest.approx(measured["by_layer"], abs=1e-5)


def test_an_interrupted_run_goes_on_where_it_stopped_with_the_same_numbers(
    finished: Run, measured: dict[str, Any], smol: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def remembered(model: Model, context: Any, *others: Any) -> Any:
        return measured[context.id]

    give(monkeypatch, smol)
    run = partial(study.run, SMALL, tmp_path)
    resumed, calls = interrupted(run, monkeypatch, collecting, "read_context", 2, remembered)
    assert len(calls) == 4
    assert json.dumps(resumed.metrics) == json.dumps(finished.metrics)


def metrics_with(
    gap: float = 0.0,
    paired: float = 0.0,
    margin: float = 0.0,
    right: float = 0.0,
    beyond: float = 0.0,
    **effects: float,
) -> dict[str, Any]:
    arm = {"kl": about(0.3), "right_summary": about(0.3)}
    return {
        "arms": {MASK.name: arm, RESTART.name: arm},
        "mask_minus_restart": {
            "kl": about(gap),
            "leak": about(0.0),
            "paired": about(paired),
            "margin": about(margin),
            "right_summary": about(right),
        },
        "calibration": {
            "right_summary_beyond_calibration": about(beyond),
            "right_summary_masked_minus_restarted": about(0.0),
        },
        "effects": {"kl": {name: about(effects.get(name, 0.0)) for name in ("provenance", "law", "delimiters")}},
        "full": {"reply_tokens": 30.0, "margin": about(20.0), "right_summary": about(0.5)},
    }


@pytest.mark.parametrize(
    ("gap", "start"),
    [(-0.2, "Masking stays nearer"), (0.2, "Restarting stays nearer"), (0.0, "Neither masking nor restarting")],
)
def test_the_sentence_on_mask_or_restart_follows_the_interval(gap: float, start: str):
    assert answer_distance(metrics_with(gap)).startswith(start)


def test_the_sentence_on_factors_follows_each_interval():
    sentence = answer_factors(metrics_with(provenance=0.2, law=-0.2))
    assert "recomputing raises it" in sentence
    assert "closing them lowers it" in sentence
    assert "dropped does not measurably change it" in sentence


@pytest.mark.parametrize(
    ("right", "beyond", "said", "reason"),
    [
        (-0.2, -0.2, "masking answers fewer than restarting", "was computed while what it sums up was in view"),
        (-0.2, 0.0, "masking answers fewer than restarting", "indistinguishable from what it does when unrelated text"),
        (0.2, 0.2, "restarting answers fewer than masking", "was computed while what it sums up was in view"),
        (0.0, -0.2, "are indistinguishable", ""),
    ],
)
def test_the_sentence_on_answers_follows_the_intervals(right: float, beyond: float, said: str, reason: str):
    sentence = answer_questions(metrics_with(right=right, beyond=beyond))
    assert said in sentence
    assert reason in sentence


@pytest.mark.parametrize(
    ("paired", "margin", "inside", "used"),
    [
        (0.2, 0.2, "and reads more centred", "the model uses some of it"),
        (0.0, 0.0, "and reads no more centred", "was not detected to use it"),
        (0.0, -0.2, "and reads no more centred", "is turned away from it"),
    ],
)
def test_the_sentence_on_the_code_follows_the_intervals(paired: float, margin: float, inside: str, used: str):
    sentence = answer_code(metrics_with(paired=paired, margin=margin))
    assert inside in sentence
    assert used in sentence
