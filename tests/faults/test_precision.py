"""Numbers stored at too low a precision."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.faults import Fp8Saturation, Fp8Scale, QuantisationNoise, Scope
from tests.faults import SLOTS, WIDTH, after, both, outlying, square_cache

FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize(("kind", "factor"), itertools.product(FP8, [0.5, 1.0, 2.0]))
def test_fp8_is_a_cast_at_one_scale_for_each_layer_and_part_read_at_a_factor(kind: Any, factor: float):
    cache = outlying(SLOTS)
    dtype, limit = FP8[kind]
    damaged, _ = after(Fp8Scale(factor, kind, scope=Scope(slots=range(5))), cache)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        scale = before.abs().max() / limit
        expected = (before / scale).clamp(-limit, limit).to(dtype).float() * scale * factor
        assert torch.allclose(now[:, :5], expected[:, :5], rtol=1e-6)
        assert torch.equal(now[:, 5:], before[:, 5:])
        assert not torch.equal(now[:, :5], factor * before[:, :5])


@pytest.mark.parametrize(("kind", "room"), itertools.product(FP8, [0.1, 0.5, 1.0]))
def test_fp8_without_room_saturates_at_the_room_and_rounds_the_rest(kind: Any, room: float):
    cache = outlying(SLOTS)
    damaged, _ = after(Fp8Saturation(room, kind), cache)
    coarse = {"e4m3": 2**-4, "e5m2": 2**-3}[kind]
    saturated = 0
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        limit = room * before.abs().max()
        beyond = before.abs() > limit
        saturated += int(beyond.sum())
        assert torch.allclose(now[beyond], limit * before[beyond].sign(), rtol=1e-5)
        within = ~beyond & (before.abs() > limit / 1000)
        assert ((now - before).abs() <= coarse * 1.001 * before.abs())[within].all()
    assert (saturated > 0) == (room < 1)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), bits=st.integers(1, 8), group=st.sampled_from([2, 4, 8, 32]))
def test_rounded_vectors_are_off_by_at_most_half_a_step_of_their_group(seed: int, bits: int, group: int):
    cache = square_cache(seed)
    damaged, _ = after(QuantisationNoise(bits, group, scope=Scope(rate=0.7)), cache)
    width = min(group, WIDTH)
    for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True):
        groups = before.unflatten(-1, (-1, width))
        step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
        # Scale and minimum are kept in float16.
        allowed = step / 2 + 2**-9 * groups.abs().amax(-1)
        error = (now.unflatten(-1, (-1, width)) - groups).abs().amax(-1)
        assert (error <= allowed).all()


def test_one_bit_leaves_two_numbers_to_a_group():
    damaged, _ = after(QuantisationNoise(1, 4), square_cache(0))
    for _, _, now in both(damaged):
        assert all(len(group.unique()) == 2 for group in now.unflatten(-1, (-1, 4)).flatten(0, 2))
