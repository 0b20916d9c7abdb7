"""What is said after several caches at once is what each says alone, token by token."""

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forced import asked_logits
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model
from kvprobe.studies.compaction.replies import answers_after, reply_logits
from kvprobe.text.tokens import Tokens
from tests.models import llama
from tests.random_caches import random_tokens

TURN = random_tokens(2, {"T3": 4})


@pytest.fixture(scope="module")
def deep() -> Model:
    """Weights so large that what a cache hides changes what is said."""
    return llama(seed=3, initializer_range=0.4)


@pytest.fixture(scope="module")
def caches(deep: Model) -> list[KVCache]:
    whole = deep.prefill(random_tokens(1, {"system": 3, "T1": 9, "T2": 5}))
    return [whole, whole.mask("T1"), whole.evict("T1").reindex()]


def step_by_step(model: Model, cache: KVCache, read: Tokens, then: list[int]) -> torch.Tensor:
    """The logits that each of these tokens meets after a cache, one token at a time."""
    cache, logits = model.extend(cache, onwards(cache, [read]))
    met = [logits[0, -1]]
    for token in then[:-1]:
        cache, logits = model.extend(cache, onwards(cache, [Tokens.of([token])]))
        met.append(logits[0, -1])
    return torch.stack(met)


def test_one_reply_is_met_by_every_cache_as_it_is_alone(deep: Model, caches: list[KVCache]):
    logits = reply_logits(deep, KVCache.join(caches), TURN, 5)
    reply = logits[0].argmax(-1).tolist()
    for row, cache in enumerate(caches):
        torch.testing.assert_close(logits[row], step_by_step(deep, cache, TURN, reply), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(logits[0], logits[1], atol=1e-2)


def test_every_question_is_answered_after_every_cache_as_it_is_alone(deep: Model, caches: list[KVCache]):
    questions = [TURN, random_tokens(3, {"ask": 6})]
    said = answers_after(deep, KVCache.join(caches), questions, 5)
    pairs = [(cache, question) for cache in caches for question in questions]
    assert len(said.tokens) == len(pairs)
    for answer, (cache, question) in zip(said.tokens, pairs, strict=True):
        assert step_by_step(deep, cache, question, list(answer)).argmax(-1).tolist() == list(answer)
    assert len(set(said.tokens)) > 3


@pytest.mark.parametrize("shared", [True, False])
def test_answers_are_met_after_a_question_as_they_are_alone(deep: Model, caches: list[KVCache], shared: bool):
    start = caches[0].fork(1 if shared else 2)
    question = TURN.shifted(int(start.ledger.following[0]))
    answers = [Tokens.of(ids, "ask", question.following) for ids in ([4, 8, 2], [9, 9, 5])]
    logits = asked_logits(deep, start, question, answers)
    for row, answer in enumerate(answers):
        expected = step_by_step(deep, caches[0], TURN, list(answer.ids))
        torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)
