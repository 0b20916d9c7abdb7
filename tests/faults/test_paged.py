"""Faults that move blocks or slots: pointers, permutations, overlapping pages."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.faults import Draws, Fault, OverlappingKV, Permuted, Scope, WrongPointers, Zeros
from kvprobe.inference.model import Model
from tests.faults import HEADS, LAYERS, PARTS, SLOTS, after, both, context_of, reindexed, same_bits, square_cache
from tests.random_caches import PADDING, assert_bit_identical, random_cache, random_tokens
from tests.refusals import refused


def order_of(now: Tensor, before: Tensor) -> list[int | None]:
    """From which slot each vector came."""
    same = now[:, None].eq(before[None]).all(-1)
    return [int(row.nonzero()[0, 0]) if bool(row.any()) else None for row in same]


@given(seed=st.integers(0, 2**31), rate=st.floats(0, 1), unit=st.sampled_from(["slot", "layer", "head"]))
def test_a_permutation_moves_every_struck_slot_among_the_struck(seed: int, rate: float, unit: Any):
    cache, scope, draws = square_cache(seed), Scope(rate=rate, unit=unit), Draws(seed)
    damaged, _ = after(Permuted(scope=scope), cache, draws)
    zeroed, _ = after(Zeros(scope=scope), cache, draws)
    orders: dict[tuple[int, int], list[Any]] = {}
    for (_, layer, now), (_, _, hit), (_, _, before) in zip(both(damaged), both(zeroed), both(cache), strict=True):
        for head in range(HEADS):
            struck = hit[head].eq(0).all(-1).nonzero()[:, 0].tolist()
            order = order_of(now[head], before[head])
            assert sorted(order) == list(range(SLOTS))
            moved = [slot for slot in range(SLOTS) if order[slot] != slot]
            assert moved == (struck if len(struck) > 1 else [])
            # K and V change places together.
            assert orders.setdefault((layer, head), order) == order


def test_layers_and_heads_are_permuted_separately():
    cache = square_cache(0)
    damaged, _ = after(Permuted(), cache)
    orders = [
        order_of(now[head], before[head])
        for (part, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True)
        for head in range(HEADS)
        if part == "k"
    ]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


@given(seed=st.integers(0, 2**31), rate=st.floats(0, 1), slots=st.integers(9, 30))
def test_swapped_pointers_exchange_whole_struck_blocks_in_all_layers_heads_and_parts(
    seed: int, rate: float, slots: int
):
    block, cache, draws = 4, square_cache(seed, slots), Draws(seed)
    scope = Scope(rate=rate)
    damaged, _ = after(WrongPointers(block=block, scope=scope), cache, draws)
    hit, _ = after(Zeros(scope=replace(scope, block=block)), cache, draws)
    first = hit.keys[0][0, 0].eq(0).all(-1)
    whole = [number for number in range(slots // block) if first[number * block]]
    orders = [
        order_of(now[head], before[head])
        for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True)
        for head in range(HEADS)
    ]
    assert all(order == orders[0] for order in orders)
    table = {}
    for slot, source in enumerate(orders[0]):
        assert source is not None
        assert source % block == slot % block
        table.setdefault(slot // block, source // block)
        assert table[slot // block] == source // block
    moved = [number for number, source in table.items() if number != source]
    assert moved == (whole if len(whole) > 1 else [])
    assert sorted(table.values()) == sorted(table)


def test_a_repeated_block_is_another_of_the_prompt_everywhere_and_the_last_partial_one_is_left():
    block, cache = 4, square_cache(0)
    sources = set()
    for repeat in range(20):
        damaged, _ = after(WrongPointers("repeated", block=block), cache, Draws(repeat=repeat))
        orders = [
            order_of(now[head], before[head])
            for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True)
            for head in range(HEADS)
        ]
        assert all(order == orders[0] for order in orders)
        assert orders[0][20:] == [20, 21]
        for number in range(5):
            part = orders[0][number * block : (number + 1) * block]
            assert part[0] is not None
            assert part == list(range(part[0], part[0] + block))
            assert part[0] % block == 0
            assert part[0] != number * block
            sources.add((number, part[0] // block))
    assert len(sources) == 5 * 4


def test_blocks_that_were_generated_point_into_the_prompt():
    block, longer = 4, square_cache(0, slots=24)
    context = context_of(longer.select(slots=torch.arange(24)[None] < 10))
    damaged, _ = after(WrongPointers("repeated", block=block), longer, context=context)
    order = order_of(damaged.keys[1][0, 1], longer.keys[1][0, 1])
    assert set(order) == set(range(8))


def test_a_repeated_block_is_never_the_struck_one_even_after_padding():
    """A row that ended early in a batch, and was read on, has padding between what it read."""
    block, cache = 4, square_cache(0, slots=20)
    segments = cache.ledger.segments.clone()
    segments[0, 4:8] = PADDING
    cache = replace(cache, ledger=replace(cache.ledger, segments=segments))
    for repeat in range(10):
        damaged, damage = after(WrongPointers("repeated", block=block), cache, Draws(repeat=repeat))
        assert damage.count.tolist() == [2 * LAYERS * HEADS * 16]
        order = order_of(damaged.keys[1][0, 1], cache.keys[1][0, 1])
        unmoved = [slot for slot, source in enumerate(order) if source == slot and not 4 <= slot < 8]
        assert not unmoved, f"slots {unmoved} were struck and hold what they held"


@pytest.mark.parametrize("pointing", ["swapped", "repeated"])
def test_a_prompt_of_one_block_has_no_other_to_point_at(pointing: Any):
    cache = square_cache(0, slots=6)
    damaged, _ = after(WrongPointers(pointing, block=4), cache)
    assert_bit_identical(damaged, cache)


def test_a_block_that_is_only_partly_in_scope_is_left_alone():
    cache = square_cache(0)
    damaged, _ = after(WrongPointers(block=8, scope=Scope(slots=range(4, 20))), cache)
    assert_bit_identical(damaged, cache)


@pytest.mark.parametrize("last", PARTS)
def test_overlapping_pages_read_the_same_for_k_and_v(last: Any):
    cache = square_cache(0)
    damaged, _ = after(OverlappingKV(last=last, block=4, scope=Scope(count=2)), cache)
    written = cache.keys if last == "k" else cache.values
    for layer in range(LAYERS):
        same = damaged.keys[layer][0].eq(damaged.values[layer][0]).all(-1)
        assert same.sum(-1).tolist() in ([8, 8], [6, 6])
        for now, before in ((damaged.keys, cache.keys), (damaged.values, cache.values)):
            assert torch.equal(now[layer][0][same], written[layer][0][same])
            assert torch.equal(now[layer][0][~same], before[layer][0][~same])


def test_overlapping_pages_of_unequal_width_are_refused():
    cache = random_cache(0, 1)
    refused(
        lambda: cache.corrupt(OverlappingKV(block=4)),
        "Keys have 4 numbers and values 5; OverlappingKV needs equal widths",
    )


@pytest.mark.parametrize("fault", [Permuted(), WrongPointers(block=4)], ids=str)
def test_exchanging_whole_slots_of_a_reindexed_cache_changes_nothing(tiny_llama: Model, fault: Fault):
    """The control of `Permuted` and `WrongPointers`, on a cache as an eviction policy leaves it."""
    cache = tiny_llama.as_seen(reindexed(tiny_llama))
    question = random_tokens(4, {"question": 3}, start=int(cache.ledger.following[0]))
    expected = tiny_llama.extend(cache, question)[1]
    logits = tiny_llama.extend(cache.corrupt(fault), question)[1]
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("kind", [WrongPointers, OverlappingKV], ids=lambda kind: kind.__name__)
def test_paged_faults_strike_blocks_of_their_own_size(kind: Any):
    cache = square_cache(0)
    fault = kind(block=4, scope=Scope(rate=0.5))
    assert fault.scope.block == 4
    damaged, damage = after(fault, cache)
    assert int(damage.count[0]) in {2 * LAYERS * HEADS * slots for slots in (12, 10)}
    assert not same_bits(damaged, cache)
