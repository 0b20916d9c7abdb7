"""The compaction study: every arm is what its name says, and the numbers decide what is claimed."""

import dataclasses
import re
from collections.abc import Callable
from itertools import product
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
from kvprobe.probing.features import read_outs
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, HIDDEN_SEGMENTS, MASK, RESTART, RETAINED, Arm
from kvprobe.studies.compaction.conclude import FACTORS, HEADLINE, HIDDEN, OUTCOMES, conclude
from kvprobe.studies.compaction.factorial import contrast
from kvprobe.studies.compaction.reading import ASKED, CALIBRATION, CONDITIONS, LOOKED_AT, SEEN, read_context
from kvprobe.studies.compaction.study import STUDY
from kvprobe.tasks.compaction import KINDS, compacted_conversation, compactions, going_on
from kvprobe.tasks.passcode import contexts
from kvprobe.text.tokens import Tokens
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.studies.runs import close

SMALL = Config(contexts=3, samples=30, folds=3, continuation=4, answer=3, batch=7)
MODEL, HOLD = "wordy", [True]
CODES = ("48213", "90577", "13662")
Read = tuple[dict[str, torch.Tensor], list[str]]


@pytest.fixture(scope="module")
def read(wordy: Model) -> Read:
    config = dataclasses.replace(SMALL, answer=8, batch=2)
    return read_context(wordy, contexts()[0], compactions()[0], contexts()[1:], CODES, config)


def test_the_pair_differs_in_provenance_alone():
    assert dataclasses.replace(MASK, provenance="recomputed") == RESTART
    assert MASK.high == {"provenance": True, "positions": True, "delimiters": False}


def by_hand(wordy: Model, arm: Arm, code: str) -> tuple[KVCache, Tokens]:
    """The cache of an arm made without policies, and the tokens of the whole conversation."""
    chat = compacted_conversation(contexts()[0], compactions()[0], code)
    tokens = chat.tokens(wordy.tokenizer)
    third = tokens.span("T3").start
    hidden = torch.tensor([[segment in HIDDEN_SEGMENTS for segment in tokens.segments[:third]]])
    if arm.delimiters == "kept":
        hidden &= ~torch.tensor([tokens.delimiters[:third]])
    if arm.provenance == "retained":
        return wordy.prefill(tokens[:third]).evict(slots=hidden).reindex(arm.mode), tokens
    kept = [index for index in range(third) if not hidden[0, index]]
    columns = ("ids", "segments", "parts", "recomputed", "delimiters")
    again = dataclasses.replace(
        tokens,
        **{name: tuple(getattr(tokens, name)[index] for index in kept) for name in columns},
        positions=tuple(kept) if arm.mode == "gapped" else tuple(range(len(kept))),
        end=third if arm.mode == "gapped" else None,
    )
    return wordy.prefill(again), tokens


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_every_arm_is_its_cache_made_by_hand(wordy: Model, read: Read, arm: Arm):
    tensors, texts = read
    for row in (0, 2):  # of different batches
        cache, tokens = by_hand(wordy, arm, CODES[row])
        third, ask, answer = tokens.span("T3").start, tokens.span("ask").start, tokens.part("answer")
        asking = tokens[third : answer.stop - 1].shifted(int(cache.ledger.following[0]))
        captured = wordy.capture(asking, ["k", "v"], slots=range(ask - third), past=cache, logits=5)
        scores = captured.logits[0].log_softmax(-1)[torch.arange(5), torch.tensor(tokens.ids[answer])]
        torch.testing.assert_close(tensors["logprob"][row, ASKED.index(arm.name)], scores, rtol=1e-3, atol=1e-3)
        for family in ("k", "v"):
            features = tensors[f"{arm.name}.{family}"]
            close(features[row if arm in RETAINED else 0], read_outs(captured.stack(family))[0])
    # What is said after T3 is that of the first code's conversation.
    cache, tokens = by_hand(wordy, arm, CODES[0])
    place, first = CONDITIONS.index(arm.name), []
    for start in (wordy.prefill(tokens[:third]), cache):
        turn = tokens[third : tokens.part("reply").start].shifted(int(start.ledger.following[0]))
        first.append(wordy.extend(start, turn)[1][0, -1])
    distance, same = divergence(*first)
    torch.testing.assert_close(tensors["reply_kl"][place, 0], distance, rtol=1e-2, atol=1e-4)
    assert tensors["agree"][place, 0] == same
    after, _ = wordy.extend(cache, tokens[third:ask].shifted(int(cache.ledger.following[0])))
    said = [wordy.generate(after, compactions()[0].question(kind), max_new_tokens=8).text for kind in KINDS]
    assert texts[place * len(KINDS) : (place + 1) * len(KINDS)] == said


@pytest.mark.parametrize("turns", [0, 3])
def test_questions_are_asked_after_so_many_turns_and_all_else_is_as_before(wordy: Model, read: Read, turns: int):
    config = dataclasses.replace(SMALL, answer=8, batch=2, turns=turns)
    tensors, texts = read_context(wordy, contexts()[0], compactions()[0], contexts()[1:], CODES, config)
    unchanged = read[0].keys() - {"worth"}
    assert all(torch.equal(tensors[name].nan_to_num(), read[0][name].nan_to_num()) for name in unchanged)
    cache, tokens = by_hand(wordy, MASK, CODES[0])
    chat = going_on(compacted_conversation(contexts()[0], compactions()[0], CODES[0]), compactions()[0], turns)
    later = chat.tokens(wordy.tokenizer)[tokens.span("T3").start :]
    after = wordy.extend(cache, later)[0] if turns else cache
    said = [wordy.generate(after, compactions()[0].question(kind), max_new_tokens=8).text for kind in KINDS]
    place = CONDITIONS.index(MASK.name)
    assert texts[place * len(KINDS) : (place + 1) * len(KINDS)] == said


def test_masking_is_held_against_restarting_on_the_same_tokens(wordy: Model, read: Read):
    logits = []
    for arm in (RESTART, MASK):
        cache, tokens = by_hand(wordy, arm, CODES[0])
        turn = tokens[tokens.span("T3").start : tokens.part("reply").start]
        logits.append(wordy.extend(cache, turn.shifted(int(cache.ledger.following[0])))[1][0, -1])
    between = read[0]["between"]
    torch.testing.assert_close(between[CONDITIONS.index(MASK.name), 0], divergence(*logits)[0], rtol=1e-3, atol=1e-6)
    given = [CONDITIONS[place] for place in between[:, 0].isfinite().nonzero()[:, 0].tolist()]
    assert given == [MASK.name, CALIBRATION[1]]


def test_answers_are_worth_what_they_share_with_the_full_context_and_what_they_hold(read: Read):
    same, prefix, right = read[0]["worth"].unbind(-1)
    full = [CONDITIONS.index(condition) for condition in ("full", CALIBRATION[0])]
    assert read[0]["reply_kl"][full].nan_to_num().max() < 1e-5
    assert read[0]["reply_kl"][CONDITIONS.index(MASK.name)].nan_to_num().sum() > 0.01
    assert (same[full] == 1).all()
    assert ((prefix < 1) == (same == 0)).all()
    assert (same == 0).any()
    texts = np.array(read[1]).reshape(len(CONDITIONS), len(KINDS))
    for number, kind in enumerate(KINDS):
        words = compactions()[0].answer(kind)
        held = [torch.nan if words is None else float(words.lower() in text.lower()) for text in texts[:, number]]
        assert right[:, number].tolist() == pytest.approx(held, nan_ok=True)


def test_a_run_holds_every_number_table_and_figure(finished: Run):
    conclusion = Conclusion.of(finished.metrics)
    findings, conversations = conclusion.findings, finished.df("conversations")
    assert len(finished.df()) == 30 * len(ASKED)
    assert set(finished.df("probes")["arm"]) == {arm.name for arm in ARMS}
    for arm, outcome in product(ARMS, OUTCOMES):
        assert not findings.at("outcome", outcome=outcome, condition=arm.name).unknown
    table: Any = conversations.groupby("condition")["kl"].mean()
    assert findings.at("gap", outcome="kl").mean == pytest.approx(table[MASK.name] - table[RESTART.name], abs=1e-12)
    assert findings.at("variation", layers="0 and 1").mean < 1e-5
    assert findings.at("variation", layers="last").mean > 1e-4
    # What is spent on the hidden turns goes elsewhere when they are masked.
    for layer in findings.values("went_by_layer", "layer"):
        went = {finding.keys["place"]: finding.value.mean for finding in findings.where("went_by_layer", layer=layer)}
        assert sum(went.values()) == pytest.approx(0, abs=1e-5)
        heads = [finding.value.mean for finding in findings.where("spent_by_head", layer=layer)]
        assert -went[HIDDEN] == pytest.approx(np.mean(heads))


Values = Callable[[str, str, int], float]
"""Of an outcome under a condition in a conversation."""
MADE_UP = Config(contexts=16, samples=64, folds=3)


def made_up(values: Values) -> Conclusion:
    """The conclusion of tables with these outcomes; of two layers of two heads each."""
    samples, conversations, attention = [], [], []
    for context, condition in product(range(MADE_UP.contexts), CONDITIONS):
        known = {"context": context, "condition": condition}
        outcomes = {name: values(name, condition, context) for name in (*OUTCOMES, "between")}
        answers = {f"answer_{kind}": f"{kind} & so" for kind in KINDS}
        conversations.append({**known, **outcomes, **answers, "tokens": 30})
        samples += [{**known, **outcomes, "code": "48213"}] * (4 * (condition in ASKED))
        for layer, head in product(range(2), range(2)) if condition in SEEN else ():
            hidden = (0.1 * (1 + layer + head) + values("spent", condition, context)) * (condition == "full")
            rest = {place: (1 - hidden) / (len(LOOKED_AT) - 1) for place in LOOKED_AT if place != HIDDEN}
            attention.append({**known, "layer": layer, "head": head, HIDDEN: hidden, **rest})
    read = ["leave-context-out", "paired", "margin", "logprob"]
    tables = {
        "samples": pd.DataFrame(samples),
        "conversations": pd.DataFrame(conversations).drop(columns=read),
        "attention": pd.DataFrame(attention),
        "variation": pd.DataFrame({"layer": [0, 1, 2], "variation": [0.0, 0.0, 0.1]}),
    }
    return conclude(tables, MADE_UP, any_model())


def planted(effects: dict[str, float], unrelated: float = 0.0) -> Values:
    """Outcomes with these effects, nearly, and this difference between masking and restarting unrelated turns."""
    arms = {arm.name: sum(effect * contrast(name, arm.high) / 4 for name, effect in effects.items()) for arm in ARMS}
    arms[CALIBRATION[1]] = unrelated

    def values(outcome: str, condition: str, context: int) -> float:
        return 0.5 + arms.get(condition, 0.0) + 1e-3 * np.sin(context * (2 + CONDITIONS.index(condition)))

    return values


def example() -> tuple[Config, Conclusion]:
    return MADE_UP, made_up(planted({"provenance": 0.2, "positions": -0.1}))


def noise(rng: np.random.Generator) -> Conclusion:
    """Conversations differ, arms do not."""
    hard = rng.uniform(0.3, 0.9, MADE_UP.contexts)

    def values(outcome: str, condition: str, context: int) -> float:
        if outcome.startswith("right"):
            return float(rng.random() < hard[context])
        return float(rng.gamma(2.0) * hard[context]) if outcome == "kl" else float(rng.beta(2, 2) * hard[context])

    return made_up(values)


def test_intervals_of_what_the_answer_claims_hold_together():
    findings = example()[1].findings
    claimed = [findings.finding("effect", outcome="kl", effect=factor) for factor in FACTORS]
    claimed += [findings.finding(name, outcome=outcome) for name in ("gap", "beyond") for outcome in HEADLINE[name]]
    assert [finding.comparisons for finding in claimed] == [len(claimed)] * 9


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
