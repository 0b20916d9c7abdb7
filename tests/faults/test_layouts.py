"""Faults of memory that is read in another layout than it was written in, and of numbers at a wrong scale."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.cache.recurrence import fold
from kvprobe.faults import ChannelOrder, ForeignScales, Misread, Scaled, Scope
from tests.faults import HEADS, LAYERS, SEEDS, WIDTH, after, square_cache
from tests.random_caches import assert_bit_identical, random_cache
from tests.refusals import refused

ORDERS = ("part slot head", "part head slot", "slot part head", "slot head part", "head part slot", "head slot part")
BLOCK, BLOCKS, REST = 4, 5, 2


@settings(max_examples=15)
@given(seed=SEEDS, written=st.sampled_from(ORDERS), read=st.sampled_from(ORDERS))
def test_a_misread_block_is_its_memory_number_by_number(seed: int, written: Any, read: Any):
    cache = square_cache(seed)
    damaged, _ = after(Misread(written, read, block=BLOCK), cache)
    sizes = {"part": 2, "slot": BLOCK, "head": HEADS}

    def place(order: str, at: dict[str, int]) -> int:
        """Of a vector in a block's memory, counted in vectors."""
        place = 0
        for axis in order.split():
            place = place * sizes[axis] + at[axis]
        return place

    for layer in range(LAYERS):
        clean = [tensor[layer][0].numpy() for tensor in (cache.keys, cache.values)]
        now = [tensor[layer][0].numpy() for tensor in (damaged.keys, damaged.values)]
        for block in range(BLOCKS):
            memory = np.zeros((2 * BLOCK * HEADS, WIDTH), np.float32)
            for part, head, slot in np.ndindex(2, HEADS, BLOCK):
                at = {"part": part, "head": head, "slot": slot}
                memory[place(written, at)] = clean[part][head, block * BLOCK + slot]
            for part, head, slot in np.ndindex(2, HEADS, BLOCK):
                at = {"part": part, "head": head, "slot": slot}
                assert np.array_equal(now[part][head, block * BLOCK + slot], memory[place(read, at)])
        for part in range(2):
            assert np.array_equal(now[part][:, -REST:], clean[part][:, -REST:]), "a block that is not full was struck"


def test_reading_as_written_and_what_is_not_whole_change_nothing():
    cache = square_cache(0)
    for fault in (
        Misread("slot head part", "slot head part", block=BLOCK),
        Misread(block=BLOCK, scope=Scope(heads=[0])),
        Misread(block=BLOCK, scope=Scope(slots=range(1, 5))),
    ):
        assert_bit_identical(after(fault, cache)[0], cache)
    one_head = square_cache(0, kv_heads=1)
    same = Misread("slot head part", "slot part head", block=BLOCK)
    assert_bit_identical(after(same, one_head)[0], one_head)


def test_misread_needs_k_and_v_of_equal_widths():
    refused(lambda: random_cache(0, 1).corrupt(Misread(block=4)), "Keys have 4 numbers and values 5; Misread needs")


def test_channels_in_the_order_of_llama_cpp_go_back_by_its_rule():
    """`[0, 2, 4, …] + [1, 3, 5, …]` of what is damaged is the key as it was."""
    cache = square_cache(0)
    damaged, _ = after(ChannelOrder(), cache)
    back = [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]
    for now, before in zip(damaged.keys, cache.keys, strict=True):
        assert torch.equal(now[..., back], before)
        assert not torch.equal(now, before)
    assert all(torch.equal(now, before) for now, before in zip(damaged.values, cache.values, strict=True))


def test_a_number_at_another_slots_scale_is_its_code_times_that_scale():
    cache = square_cache(0)
    damaged, _ = after(ForeignScales(), cache)
    for now, before in zip((*damaged.keys, *damaged.values), (*cache.keys, *cache.values), strict=True):
        scales = before[0].abs().amax(-1) / 127
        codes = (before[0] / scales[..., None]).round()
        read_with = (now[0].abs().amax(-1) / codes.abs().amax(-1))[..., None]
        assert torch.allclose(now[0], codes * read_with, atol=1e-5)
        slot = (read_with - scales[:, None]).abs().argmin(-1)
        assert torch.allclose(read_with[..., 0], scales.gather(1, slot), atol=1e-6)
        assert bool((slot != torch.arange(cache.slots)).all()), "a slot kept its own scale"


@pytest.mark.parametrize("rule", ["step", "gain"])
def test_scaling_all_values_scales_the_state_of_a_recurrent_layer(rule: str):
    cache = square_cache(1)
    part = Scope(parts="value")
    rng = torch.Generator().manual_seed(0)
    shape = (1, HEADS, cache.slots)
    writes = {
        "key": torch.randn(*shape, 4, generator=rng),
        "value": torch.randn(*shape, 6, generator=rng),
        "decay": -torch.rand(*shape, 2, generator=rng),
        rule: torch.rand(*shape, 1, generator=rng),
        "conv": torch.randn(1, 1, cache.slots, 3, generator=rng),
    }
    damaged = replace(cache, layers=(writes,)).corrupt(Scaled(2.0, scope=part))
    assert torch.allclose(fold(damaged.layers[0]), 2 * fold(writes), atol=1e-5)
