"""What a model makes of a code, of choices and of a reply, from its logits."""

import pytest
import torch

from kvprobe.inference.outcomes import choice_measurements, logprobs_of, surprise, use_measurements


def test_a_preference_for_some_digits_is_no_knowledge_of_the_code():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 10, (40, 5), generator=generator)
    blind, liking = torch.zeros(40, 5, 50), torch.zeros(40, 5, 50)
    liking[:, :, :10] = 3.0 + torch.randn(10, generator=generator)
    telling = liking.clone()
    telling.scatter_add_(2, codes[:, :, None], torch.full((40, 5, 1), 2.0))
    measurements = use_measurements([telling, liking, blind], codes, range(40))
    logprob, margin = measurements["logprob"].sum(2).mean(0), measurements["margin"].sum(2).mean(0)
    assert logprob[1] > logprob[2] + 1
    assert margin[0] > 7
    assert margin[1].abs() < 1e-4
    assert margin[2].abs() < 1e-4


def test_a_choice_that_a_model_likes_anyway_gains_nothing():
    choices, before = torch.tensor([[3, 5, 7]] * 2), torch.zeros(2, 9)
    before[:, 3] = 4.0
    after = before.clone()
    after[0, 7] += 3.0
    measured = choice_measurements(after, choices, [2, 2], logprobs_of(before, choices))
    assert measured["correct"].tolist() == [True, False]
    torch.testing.assert_close(measured["margin"], torch.tensor([3.0, 0.0]))


def test_the_surprise_of_a_reply_is_in_nats():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    assert surprise(logits, (1, 2)).tolist() == pytest.approx([1.386294, 0.223144], abs=1e-5)
