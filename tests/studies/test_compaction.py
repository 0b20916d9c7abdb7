"""The compaction study: every arm is what its name says, and the numbers decide what is claimed."""

import dataclasses
import re
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.factorial import contrast
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.probing.features import read_outs
from kvprobe.studies.compaction import Config, run
from kvprobe.studies.compaction.arms import ARMS, EFFECTS, HIDDEN_SEGMENTS, MASK, RECOMPUTED, RESTART, RETAINED
from kvprobe.studies.compaction.conclude import FACTORS, HEADLINE, HIDDEN, OUTCOMES, conclude
from kvprobe.studies.compaction.reading import ASKED, CALIBRATION, CONDITIONS, LOOKED_AT, SEEN, read_context
from kvprobe.studies.compaction.study import STUDY
from kvprobe.tasks.compaction import KINDS, compacted_conversation, compactions
from kvprobe.tasks.passcode import contexts
from tests.models import any_model
from tests.studies.runs import answer_of, assert_figures, close, in_steps

SMALL = Config(contexts=3, samples=30, folds=3, continuation=4, answer=3, batch=7)
ANSWERING = dataclasses.replace(SMALL, answer=8)
CODES = ("48213", "90577", "13662")
Read = tuple[dict[str, torch.Tensor], dict[str, list[str]]]


@pytest.fixture(scope="module")
def read(wordy: Model) -> Read:
    return read_context(wordy, contexts()[0], compactions()[0], contexts()[1:], CODES, ANSWERING)


@pytest.fixture(scope="module")
def finished(wordy: Model, root: Path) -> Run:
    return in_steps(lambda: run(SMALL, root, model=wordy))


def test_the_arms_are_every_combination_and_the_pair_differs_in_provenance_alone():
    assert len(set(ARMS)) == 8
    assert set(RETAINED) | set(RECOMPUTED) == set(ARMS)
    assert dataclasses.replace(MASK, provenance="recomputed") == RESTART


def by_hand(wordy: Model, arm: Any, code: str) -> tuple[Any, Any]:
    """The cache of an arm made without policies, and the tokens of the whole conversation."""
    chat = compacted_conversation(contexts()[0], compactions()[0], code)
    tokens = chat.tokens(wordy.tokenizer)
    third = tokens.span("T3").start
    hidden = torch.tensor([[segment in HIDDEN_SEGMENTS for segment in tokens.segments[:third]]])
    if arm.delimiters == "kept":
        hidden &= ~torch.tensor([tokens.delimiters[:third]])
    if arm.provenance == "retained":
        cache = wordy.prefill(tokens[:third]).evict(slots=hidden)
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
    return wordy.prefill(again), tokens


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_says_of_the_code_what_its_cache_made_by_hand_says(wordy: Model, read: Read, arm: Any):
    cache, tokens = by_hand(wordy, arm, CODES[1])
    third, answer = tokens.span("T3").start, tokens.part("answer")
    start = int(cache.ledger.following[0])
    _, logits = wordy.extend(cache, tokens[third : answer.stop - 1].shifted(start), logits=5)
    scores = logits[0].log_softmax(-1)
    expected = scores[torch.arange(5), torch.tensor(tokens.ids[answer])]
    logprobs = read[0]["logprob"][1, 1 + ARMS.index(arm)]
    torch.testing.assert_close(logprobs, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arm", [MASK, RETAINED[3], RESTART], ids=lambda arm: arm.name)
def test_what_the_probes_see_is_t3_under_that_arm(wordy: Model, read: Read, arm: Any):
    cache, tokens = by_hand(wordy, arm, CODES[0])
    turn = tokens[tokens.span("T3").start : tokens.span("ask").start].shifted(int(cache.ledger.following[0]))
    captured = wordy.capture(turn, ["k", "v"], past=cache)
    for family in ("k", "v"):
        expected = read_outs(captured.stack(family))[0]
        features = read[0][f"{arm.name}.{family}"][0]
        close(features, expected)


def test_the_distance_from_the_full_context_is_that_of_reading_its_reply_under_the_arm(wordy: Model, read: Read):
    arm = RETAINED[2]
    cache, tokens = by_hand(wordy, arm, CODES[0])
    third = tokens.span("T3").start
    turn = tokens[third : tokens.part("reply").start]
    full, logits = wordy.extend(wordy.prefill(tokens[:third]), turn)
    cache, other = wordy.extend(cache, turn.shifted(int(cache.ledger.following[0])))
    for step in range(SMALL.continuation):
        scores, others = logits[0, -1].log_softmax(-1), other[0, -1].log_softmax(-1)
        expected = (scores.exp() * (scores - others)).sum()
        place = CONDITIONS.index(arm.name)
        torch.testing.assert_close(read[0]["kl"][place, step], expected, rtol=1e-2, atol=1e-4)
        token = dataclasses.replace(turn[:1], ids=(int(scores.argmax()),), end=None)
        full, logits = wordy.extend(full, token.shifted(int(full.ledger.following[0])))
        cache, other = wordy.extend(cache, token.shifted(int(cache.ledger.following[0])))


@pytest.mark.parametrize("arm", [MASK, RETAINED[3], RESTART, RECOMPUTED[3]], ids=lambda arm: arm.name)
def test_the_answers_of_an_arm_are_those_that_its_cache_made_by_hand_gives_alone(wordy: Model, read: Read, arm: Any):
    cache, tokens = by_hand(wordy, arm, CODES[0])
    turn = tokens[tokens.span("T3").start : tokens.span("ask").start]
    cache, _ = wordy.extend(cache, turn.shifted(int(cache.ledger.following[0])))
    full, _ = wordy.extend(wordy.prefill(tokens[: tokens.span("T3").start]), turn)
    place = CONDITIONS.index(arm.name)
    for number, kind in enumerate(KINDS):
        question = compactions()[0].question(kind)
        alone, whole = (wordy.generate(start, question, max_new_tokens=ANSWERING.answer) for start in (cache, full))
        assert read[1][arm.name][number] == alone.text
        assert read[1]["full"][number] == whole.text
        assert read[0]["same"][place, number] == (alone.tokens == whole.tokens)
        words = compactions()[0].answer(kind)
        if words is not None:
            assert read[0]["right"][place, number] == (words.lower() in alone.text.lower())


def test_every_full_context_is_no_distance_from_itself(read: Read):
    for condition in ("full", CALIBRATION[0]):
        place = CONDITIONS.index(condition)
        assert read[0]["kl"][place].nan_to_num().max() < 1e-5
        assert (read[0]["same"][place] == 1).all()
        assert (read[0]["prefix"][place] == 1).all()
    assert (read[0]["kl"][CONDITIONS.index(MASK.name)].nan_to_num().sum()) > 0.01


def test_attention_is_shared_out_whole_and_none_of_it_goes_to_what_is_hidden(read: Read):
    attention = read[0]["attention"]
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:-1]), rtol=0, atol=1e-5)
    hidden = LOOKED_AT.index(HIDDEN)
    assert (attention[1:, ..., hidden] == 0).all()
    assert attention[0, ..., hidden].mean() > 0.05
    # At layer 0 nothing but positions and tokens counts, so masking and restarting look alike there.
    torch.testing.assert_close(attention[1, 0], attention[2, 0], rtol=0, atol=1e-5)


def test_the_irrelevant_block_changes_the_hidden_text_and_nothing_else(wordy: Model):
    tokens = compacted_conversation(contexts()[0], compactions()[0], CODES[0]).tokens(wordy.tokenizer)
    other = irrelevant(wordy, tokens, contexts()[1:])
    assert dataclasses.replace(other, ids=tokens.ids) == tokens
    for index, (token, changed) in enumerate(zip(tokens.ids, other.ids, strict=True)):
        if tokens.segments[index] not in HIDDEN_SEGMENTS or tokens.delimiters[index]:
            assert token == changed
    hidden = [i for i, s in enumerate(tokens.segments) if s in HIDDEN_SEGMENTS and not tokens.delimiters[i]]
    assert np.mean([tokens.ids[index] != other.ids[index] for index in hidden]) > 0.9


def test_a_run_holds_every_number_table_and_figure(finished: Run):
    conclusion = Conclusion.of(finished.metrics)
    conversations = finished.df("conversations")
    assert len(finished.df()) == 30 * len(ASKED)
    assert len(conversations) == 3 * len(CONDITIONS)
    assert len(finished.df("attention")) == 3 * len(SEEN) * len(conclusion.findings.where("spent_by_head"))
    assert set(finished.df("probes")["arm"]) == {arm.name for arm in ARMS}
    for arm, outcome in product(ARMS, OUTCOMES):
        assert not conclusion.findings.at("outcome", outcome=outcome, condition=arm.name).unknown
    assert len(conclusion.findings.where("effect")) == len(OUTCOMES) * len(EFFECTS)
    assert_figures(finished, "arms", "effects", "dangling")
    table: Any = conversations.groupby("condition")["kl"].mean()
    gap = conclusion.findings.at("gap", outcome="kl").mean
    assert gap == pytest.approx(table[MASK.name] - table[RESTART.name], abs=1e-12)


def test_the_code_does_not_reach_the_first_layers_of_retained_arms(finished: Run):
    conclusion = Conclusion.of(finished.metrics)
    assert [control.holds for control in conclusion.controls] == [True]
    assert conclusion.findings.at("variation", layers="0 and 1").mean < 1e-5
    assert conclusion.findings.at("variation", layers="last").mean > 1e-4


def test_what_is_spent_on_the_hidden_turns_goes_elsewhere_when_they_are_masked(finished: Run):
    findings = Conclusion.of(finished.metrics).findings
    for layer in findings.values("went_by_layer", "layer"):
        went = {finding.keys["place"]: finding.value.mean for finding in findings.where("went_by_layer", layer=layer)}
        assert sum(went.values()) == pytest.approx(0, abs=1e-5)
        heads = [finding.value.mean for finding in findings.where("spent_by_head", layer=layer)]
        assert -went[HIDDEN] == pytest.approx(np.mean(heads))


class Values(Protocol):
    def __call__(self, outcome: str, condition: str, context: int, /) -> float: ...


MADE_UP = Config(contexts=16, samples=64, folds=3)


def made_up(values: Values, variation: float = 0.0, config: Config = MADE_UP) -> Conclusion:
    """The conclusion of tables with these outcomes; of two layers of two heads each."""
    samples, conversations, attention = [], [], []
    for context, condition in product(range(config.contexts), CONDITIONS):
        known = {"context": context, "condition": condition}
        outcomes = {name: values(name, condition, context) for name in OUTCOMES}
        answers = {f"answer_{kind}": f"{kind} & so" for kind in KINDS}
        conversations.append(
            {**known, **outcomes, **answers, "between": values("between", condition, context), "tokens": 30}
        )
        if condition in ASKED:
            samples += [{**known, **outcomes, "code": "48213"}] * (config.samples // config.contexts)
        for layer, head in product(range(2), range(2)) if condition in SEEN else ():
            hidden = (0.1 * (1 + layer + head) + values("spent", condition, context)) * (condition == "full")
            rest = {place: (1 - hidden) / (len(LOOKED_AT) - 1) for place in LOOKED_AT if place != HIDDEN}
            attention.append({**known, "layer": layer, "head": head, HIDDEN: hidden, **rest})
    read = ["leave-context-out", "paired", "margin", "logprob"]
    tables = {
        "samples": pd.DataFrame(samples),
        "conversations": pd.DataFrame(conversations).drop(columns=read),
        "attention": pd.DataFrame(attention),
        "variation": pd.DataFrame({"layer": [0, 1, 2], "variation": [0.0, variation, 0.1]}),
    }
    return conclude(tables, config, any_model())


def planted(effects: dict[str, float], unrelated: float = 0.0) -> Values:
    """Outcomes with these effects, nearly, and this difference between masking and restarting unrelated turns."""
    arms = {arm.name: sum(effect * contrast(name, arm.high) / 4 for name, effect in effects.items()) for arm in ARMS}
    arms[CALIBRATION[1]] = unrelated

    def values(outcome: str, condition: str, context: int) -> float:
        return 0.5 + arms.get(condition, 0.0) + 1e-3 * np.sin(context * (2 + CONDITIONS.index(condition)))

    return values


def example() -> tuple[Config, Conclusion]:
    """For the tests of all declared studies."""
    return MADE_UP, made_up(planted({"provenance": 0.2, "positions": -0.1}))


def noise(rng: np.random.Generator) -> Conclusion:
    """Conversations differ, arms do not."""
    hard = rng.uniform(0.3, 0.9, MADE_UP.contexts)

    def values(outcome: str, condition: str, context: int) -> float:
        if outcome.startswith("right"):
            return float(rng.random() < hard[context])
        return float(rng.gamma(2.0) * hard[context]) if outcome == "kl" else float(rng.beta(2, 2) * hard[context])

    return made_up(values)


def test_effects_are_those_that_were_planted_and_nothing_else():
    effects = dict(zip(EFFECTS, [0.1, -0.06, 0.04, 0.03, 0.0, -0.05, 0.02], strict=True))
    findings = made_up(planted(effects)).findings
    for outcome, (effect, size) in product(OUTCOMES, effects.items()):
        assert findings.at("effect", outcome=outcome, effect=effect).mean == pytest.approx(size, abs=1e-3)


def test_intervals_hold_together_over_the_answers_own_claims_and_over_each_table_beside_it():
    findings = example()[1].findings
    assert (headline := sum(map(len, HEADLINE.values())) - 1 + len(FACTORS)) == 9
    for name, outcome in product(("gap", "beyond"), OUTCOMES):
        other = sum(finding.keys["outcome"] not in HEADLINE[name] for finding in findings.where(name))
        outcome_finding = findings.find(name, outcome=outcome)
        assert outcome_finding is None or outcome_finding.comparisons == (
            headline if outcome in HEADLINE[name] else other
        )
    families = {
        outcome: [finding.comparisons for finding in findings.where("effect", outcome=outcome)] for outcome in OUTCOMES
    }
    assert families == {outcome: [7] * 7 for outcome in OUTCOMES} | {"kl": [9] * 3 + [4] * 4}


@pytest.mark.parametrize(
    ("provenance", "unrelated", "gap", "beyond"),
    [
        (0.2, 0.0, "raises", "raises"),
        (-0.2, 0.0, "lowers", "lowers"),
        (-0.2, -0.2, "lowers", "was not detected to change"),
        (0.0, 0.2, "was not detected to change", "lowers"),
    ],
)
def test_the_answer_follows_the_intervals(provenance: float, unrelated: float, gap: str, beyond: str, tmp_path: Path):
    conclusion = made_up(planted({"provenance": provenance, "delimiters": 0.1}, unrelated))
    said = answer_of(STUDY, MADE_UP, conclusion, tmp_path)
    assert said.startswith(f"Masking instead of restarting at the same positions {gap} the distance")
    assert "right answers to questions on the summary" in said.split(".")[0]
    assert f"it {beyond} these right answers." in said
    changed = {"raises": "raised", "lowers": "lowered"}.get(gap, "not detectably changed")
    assert f"is {changed} by retaining instead of recomputing" in said
    assert re.search("is not detectably changed by .*leaving gaps instead of closing them", said)


def test_a_code_that_reaches_the_first_layers_fails_the_control():
    assert [made_up(planted({}), varied).controls[0].holds for varied in (1e-6, 1e-3)] == [True, False]
