"""Answers that a model is given: how likely they are, alone and beside others."""

import pytest
import torch

from kvprobe.inference.forced import chances, given_answer
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


def test_a_given_answer_is_as_likely_as_its_tokens_one_after_the_other(tiny_llama: Model):
    (before,), (prompt,) = tiny_llama.tokens("once upon a time"), tiny_llama.tokens("there was")
    past = tiny_llama.prefill(before)
    prompt, cache = prompt.shifted(before.following), past
    likeliest, expected, read = [], 0.0, prompt
    for _ in range(3):
        cache, logits = tiny_llama.extend(cache, [read])
        likeliest.append(int(logits[0, -1].argmax()))
        expected += float(logits[0, -1].log_softmax(-1).max())
        read = Tokens.of(likeliest[-1:], "answer", read.following)
    given = given_answer(tiny_llama, past, prompt, likeliest)
    assert given.likeliest
    assert given.log_prob == pytest.approx(expected, abs=1e-4)
    other = given_answer(tiny_llama, past, prompt, [likeliest[0], (likeliest[1] + 1) % 50, likeliest[2]])
    assert not other.likeliest
    assert other.log_prob < given.log_prob


def test_chances_are_read_at_the_first_token_that_differs(tiny_llama: Model):
    (before,) = tiny_llama.tokens("once upon a time")
    likely = chances(tiny_llama, before, [[7, 3, 9], [7, 4, 9], [7, 5]])
    logits = tiny_llama.extend(None, [before + Tokens.of([7], "answer", before.following)])[1][0, -1]
    assert likely == pytest.approx(torch.softmax(logits[[3, 4, 5]], -1).tolist(), rel=1e-4)
    assert sum(likely) == pytest.approx(1)
