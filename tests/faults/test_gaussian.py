"""Gaussian noise: its statistics, and noise matched by its effect."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvprobe.faults import Draws, FaultContext, Gaussian, Scope
from kvprobe.faults.gaussian import _TRIAL, effect, shares
from tests.faults import (
    GROUP,
    HEADS,
    LAYERS,
    PARTS,
    TOKENS,
    UNITS,
    WIDTH,
    after,
    both,
    context_of,
    outlying,
    same_bits,
    square_cache,
)
from tests.random_caches import random_cache


def moments_of(vectors: Tensor) -> tuple[Tensor, Tensor]:
    return vectors.mean(), vectors.std(correction=0)


def test_layer_noise_has_the_layers_mean_and_deviation_in_every_head_and_channel():
    cache = outlying(3000)
    damaged, _ = after(Gaussian("layer"), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        mean, deviation = moments_of(before)
        assert (now.mean(1) - mean).abs().max() < 5 * deviation / 3000**0.5
        assert (now.std(1) / deviation - 1).abs().max() < 5 / 6000**0.5


def test_head_noise_has_each_heads_mean_and_deviation():
    cache = outlying(3000)
    damaged, _ = after(Gaussian("head"), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        for head in range(HEADS):
            mean, deviation = moments_of(before[head])
            assert (now[head].mean(0) - mean).abs().max() < 5 * deviation / 3000**0.5
            assert (now[head].std(0) / deviation - 1).abs().max() < 5 / 6000**0.5


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_channel_noise_has_the_mean_and_covariance_of_each_heads_channels(scale: float):
    cache = outlying(6000)
    damaged, _ = after(Gaussian("channel", scale=scale), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        for head in range(HEADS):
            expected = torch.cov(before[head].T.double(), correction=0) * scale**2
            deviation = expected.diagonal().sqrt()
            assert ((now[head].mean(0) - before[head].mean(0)).abs() < 5 * deviation / 6000**0.5).all()
            error = (torch.cov(now[head].T.double()) - expected) / torch.outer(deviation, deviation)
            assert error.abs().max() < 5 * (2 / 6000) ** 0.5


def test_channel_noise_stays_within_the_few_directions_of_a_short_cache():
    cache = square_cache(0, slots=4)
    damaged, _ = after(Gaussian("channel", scope=Scope(slots=[0, 1, 2])), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        for head in range(HEADS):
            mean = before[head].mean(0)
            directions = torch.linalg.svd(before[head] - mean).Vh[3:]
            assert ((now[head, :3] - mean) @ directions.T).abs().max() < 1e-3


def test_raw_noise_is_white_and_its_scale_is_its_deviation():
    cache = outlying(3000)
    damaged, _ = after(Gaussian("raw", scale=3.0), cache)
    once, _ = after(Gaussian("raw"), cache)
    drawn = torch.stack([noise for _, _, noise in both(damaged)]).double()
    assert abs(float(drawn.mean())) < 5 * 3 / drawn.numel() ** 0.5
    assert abs(float(drawn.std()) / 3 - 1) < 5 / (2 * drawn.numel()) ** 0.5
    assert abs(float((drawn / 3).pow(4).mean()) - 3) < 0.05
    assert torch.allclose(drawn.float(), 3 * torch.stack([noise for _, _, noise in both(once)]))
    # K and V, layers and heads draw noise of their own.
    correlation = torch.corrcoef(drawn.flatten(0, 1).flatten(1)).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / (3000 * WIDTH) ** 0.5


def test_noise_without_deviation_is_the_mean():
    cache = outlying(40)
    damaged, _ = after(Gaussian("head", scale=0.0), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        assert torch.allclose(now, before.mean((1, 2))[:, None, None].expand_as(now), atol=1e-5)


def effect_by_hand(context: FaultContext, layer: int, part: str, share: float) -> float:
    """The same, slot by slot: attention computed anew with one slot's K or V replaced in all heads."""
    assert context.queries is not None
    keys, values = context.cache.keys[layer][0], context.cache.values[layer][0]
    heads, slots, width = (keys if part == "k" else values).shape
    vectors = keys if part == "k" else values
    noise = Draws().normal((heads, slots, width), _TRIAL, layer, int(part == "v"))
    noise = vectors.mean() + vectors.std(correction=0) * noise

    def attention(keys: Tensor, values: Tensor) -> Tensor:
        outputs = []
        for token in range(TOKENS):
            heads_outputs = []
            for head in range(heads):
                for query in range(GROUP):
                    asked = context.queries.rows[layer][head, token * GROUP + query]
                    weights = (keys[head] @ asked * context.queries.scale[layer]).softmax(0)
                    heads_outputs.append(weights @ values[head])
            outputs.append(torch.cat(heads_outputs))
        return torch.stack(outputs)

    clean = attention(keys, values)
    moved = []
    for slot in range(1, slots):
        changed = vectors.clone()
        changed[:, slot] = (1 - share) * vectors[:, slot] + share * noise[:, slot]
        other = attention(changed, values) if part == "k" else attention(keys, changed)
        moved.append((other - clean).norm(dim=1) / clean.norm(dim=1))
    return float(torch.stack(moved).mean())


@pytest.mark.parametrize(("part", "share"), itertools.product(PARTS, [0.25, 1.0, 3.0]))
def test_the_effect_of_noise_is_that_of_replacing_one_slot_at_a_time(part: Any, share: float):
    cache = random_cache(0, 1, 9, LAYERS, HEADS, WIDTH)
    context = FaultContext(cache, queries=context_of(square_cache(0)).queries)
    for layer in range(LAYERS):
        assert float(effect(context, layer, part, share)) == pytest.approx(
            effect_by_hand(context, layer, part, share), rel=1e-3
        )


@pytest.mark.parametrize("part", PARTS)
def test_shares_give_every_layer_the_geometric_mean_of_effects(part: Any):
    cache = square_cache(0)
    scales = (1.0, 3.0, 0.5)
    cache = cache.with_parts({"K": tuple(scale * keys for scale, keys in zip(scales, cache.keys, strict=True))})
    context = context_of(cache)
    whole = torch.stack([effect(context, layer, part, 1.0) for layer in range(LAYERS)])
    target = float(whole.log().mean().exp())
    for layer, share in enumerate(shares(context, part)):
        assert float(effect(context, layer, part, share)) == pytest.approx(target, rel=1e-3)


def test_noise_matched_by_effect_is_layer_noise_mixed_in_by_its_share():
    cache = square_cache(0)
    context = context_of(cache)
    scope = Scope(rate=0.5)
    damaged, _ = after(Gaussian("effect", scale=0.5, scope=scope), cache, context=context)
    noise, _ = after(Gaussian("layer", scope=scope), cache, context=context)
    for (part, layer, now), (_, _, replaced), (_, _, before) in zip(
        both(damaged), both(noise), both(cache), strict=True
    ):
        share = 0.5 * shares(context, part)[layer]  # pyright: ignore[reportArgumentType]
        assert torch.allclose(now, before + share * (replaced - before), atol=1e-5)


@pytest.mark.parametrize("how", ["layer", "head", "channel", "effect"])
def test_rows_of_one_operator_struck_together_are_rows_struck_alone_at_real_widths(how: Any):
    cache = square_cache(1, slots=90, d_head=64)
    context = context_of(cache)
    faults = [Gaussian(how, scope=Scope(rate=rate, unit=unit)) for rate in (0.02, 0.3, 1.0) for unit in UNITS]
    together, _ = after(faults, cache, context=context)
    for row, fault in enumerate(faults):
        assert same_bits(together.rows([row]), after(fault, cache, context=context)[0]), fault


@pytest.mark.parametrize("matched", ["mean", "spread", "covariance", "mean+covariance"])
def test_what_noise_names_is_each_channels_own_and_the_rest_the_layers(matched: Any):
    cache = outlying(6000)
    damaged, _ = after(Gaussian(matched), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        mean, deviation = moments_of(before)
        for head in range(HEADS):
            means, deviations = before[head].mean(0), before[head].std(0)
            means = means if "mean" in matched else mean.expand_as(means)
            deviations = deviations if "spread" in matched else deviation.expand_as(deviations)
            assert ((now[head].mean(0) - means).abs() < 5 * deviations / 6000**0.5).all()
            assert (now[head].std(0) / deviations - 1).abs().max() < 5 / 6000**0.5
            alike = torch.corrcoef(before[head].T.double())
            alike = alike if "covariance" in matched else torch.eye(len(alike), dtype=torch.float64)
            assert (torch.corrcoef(now[head].T.double()) - alike).abs().max() < 5 * (2 / 6000) ** 0.5
