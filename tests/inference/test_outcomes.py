"""What a model makes of a code, from its logits."""

import torch

from kvprobe.inference.outcomes import use_measurements


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
