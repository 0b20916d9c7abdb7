"""Writing into a cache: undo, rows, and reports of NaN and infinity."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.faults import (
    Distractor,
    Draws,
    Fault,
    FaultContext,
    Gaussian,
    NonFinite,
    NotANumber,
    Permuted,
    PositionShift,
    Scope,
    WrongPointers,
    Zeros,
)
from kvprobe.faults.strike import strike
from kvprobe.inference.model import Model
from tests.faults import EVERY, PARTS, SLOTS, WIDTH, after, both, context_of, reindexed, same_bits, square_cache
from tests.random_caches import random_tokens
from tests.refusals import refused


def test_overlapping_strikes_undone_in_reverse_order_leave_no_trace():
    cache, context = square_cache(0), context_of(square_cache(0))
    layers = [{name: part.clone() for name, part in layer.items()} for layer in cache.layers]
    damages = [
        strike([fault], [Draws()], [0], layers, cache.ledger, context, remember=True)
        for fault in (Gaussian("raw", scope=Scope(rate=0.6)), Zeros(scope=Scope(rate=0.4, unit="number")))
    ]
    for damage in reversed(damages):
        damage.undo()
    assert same_bits(KVCache(tuple(layers), cache.ledger), cache)


def test_a_reindexed_cache_is_refused_until_its_keys_are_rotated(tiny_llama: Model):
    refused(lambda: reindexed(tiny_llama).corrupt(Zeros()), "Model.as_seen")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", PARTS)
def test_nan_and_infinity_are_reported_with_their_place(value: float, part: Any):
    scope = Scope(layers=[1], heads=[1], slots=[7, 9], parts=part)
    damaged, damage = after(NotANumber(value, scope=scope), square_cache(0), step=3)
    assert damage.nonfinite == {0: NonFinite(part, 1, 1, 7, 3)}
    assert str(damage.nonfinite[0]) == f"{part.upper()} of layer 1, KV head 1, slot 7"
    bad = (damaged.keys if part == "k" else damaged.values)[1][0, 1]
    assert not bad[[7, 9]].isfinite().any()
    assert sum(int((~layer.isfinite()).sum()) for _, _, layer in both(damaged)) == 2 * WIDTH


def test_a_single_nan_is_reported():
    _, damage = after(NotANumber(scope=Scope(count=1, unit="number", layers=[2], parts="v")), square_cache(0))
    assert damage.nonfinite[0].layer == 2
    assert damage.nonfinite[0].part == "v"
    assert damage.count.tolist() == [1]


def test_finite_numbers_whose_sum_overflows_are_not_reported():
    cache = square_cache(0, dtype=torch.float16)
    for layer in cache.keys + cache.values:
        layer.fill_(6e4)
    damaged, damage = after(Permuted(), cache)
    assert not damage.nonfinite
    assert same_bits(damaged, cache)


def test_corrupt_needs_as_many_contexts_and_draws_as_rows():
    cache = square_cache(0).fork(2)
    contexts = [FaultContext(cache.rows([0]))] * 2
    refused(lambda: cache.corrupt(Zeros(), contexts=contexts[:1]), "2 rows, but there are 1 fault contexts and 2 draws")
    refused(lambda: cache.corrupt(Zeros(), draws=[Draws()] * 3), "2 rows, but there are 2 fault contexts and 3 draws")


def test_a_row_of_a_padded_batch_is_damaged_as_it_is_alone():
    short, long = square_cache(1, slots=9), square_cache(2, slots=SLOTS)
    both = KVCache.join([short, long])
    draws = [Draws(sample=4), Draws(sample=5)]
    for fault in (Zeros(scope=Scope(rate=0.4)), Zeros(scope=Scope(rate=0.4, unit="head")), Gaussian("raw")):
        damaged = both.corrupt(fault, draws=draws)
        for row, cache in enumerate((short, long)):
            alone = cache.corrupt(fault, draws=draws[row : row + 1])
            held = slice(0, cache.slots)
            for mine, expected in zip(damaged.keys + damaged.values, alone.keys + alone.values, strict=True):
                assert torch.equal(mine[row, :, held], expected[0]), (fault, row)


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_a_cache_whose_numbers_lie_in_another_order_is_damaged_alike(fault: Fault):
    """As those of a dump do, which has an axis of slots before that of heads."""
    cache, context = square_cache(3), context_of(square_cache(3))
    turned = [{name: part.transpose(1, 2).contiguous().transpose(1, 2) for name, part in layer.items()}
              for layer in cache.layers]  # fmt: skip
    turned = replace(cache, layers=tuple(turned))
    assert same_bits(*(one.corrupt(fault, contexts=[context]) for one in (turned, cache)))


@pytest.mark.parametrize(
    "fault",
    [
        Zeros(scope=Scope(rate=0.4)),
        Zeros(scope=Scope(rate=0.4, block=3)),
        Gaussian("channel"),
        WrongPointers(block=3, pointing="repeated"),
        Permuted(),
        PositionShift(by=2),
        Distractor(),
    ],
    ids=str,
)
def test_a_row_padded_between_its_slots_is_damaged_as_it_is_alone(fault: Fault, tiny_llama: Model):
    tokens, draws = random_tokens(0, {"T1": 7, "T2": 6}), [Draws(sample=4)]
    alone = tiny_llama.prefill(tokens)
    lead = KVCache.join([tiny_llama.prefill(tokens[:7]), tiny_llama.prefill(random_tokens(1, {"T1": 9}))]).rows([0])
    padded, _ = tiny_llama.extend(lead, tokens[7:])
    filled = ~padded.ledger.padding[0]
    assert padded.slots == 15
    given: Any = {"donors": {"distractor": tiny_llama.prefill(random_tokens(2, {"T1": 20}))}}
    given["rotaries"] = tiny_llama.lanes.rotaries
    expected = alone.corrupt(fault, draws=draws, contexts=[FaultContext(alone, **given)])
    damaged = padded.corrupt(fault, draws=draws, contexts=[FaultContext(padded, **given)])
    for mine, theirs in zip(damaged.keys + damaged.values, expected.keys + expected.values, strict=True):
        assert torch.allclose(mine[:, :, filled], theirs, atol=1e-5)
        assert not mine[:, :, ~filled].any()
    swept, whole = (
        tiny_llama.sweep(cache, [fault], "a b", donors=given["donors"], max_new_tokens=2) for cache in (padded, alone)
    )
    assert swept.outcomes[0].struck == whole.outcomes[0].struck
    assert swept.outcomes[0].kl == pytest.approx(whole.outcomes[0].kl, abs=1e-4)


def test_slots_by_index_in_a_row_padded_between_them_are_refused():
    lead = KVCache.join([square_cache(1, slots=3), square_cache(2, slots=5)])
    later = square_cache(3, slots=2).fork(2)
    positions = later.ledger.positions + 5
    moved = replace(later, ledger=replace(later.ledger, positions=positions, origins=positions))
    padded = lead.append(moved)
    refused(lambda: padded.corrupt(Zeros(scope=Scope(slots=[4]))), "padding between its slots")
    nan = padded.corrupt(NotANumber(scope=Scope(segments=["T2"], count=1, unit="slot")))
    refused(nan.refuse_nonfinite, "slot")


def test_corrupt_strikes_each_row_now_with_draws_of_its_own():
    cache = square_cache(3)
    fault = Zeros(scope=Scope(rate=0.5), at=7, transient=True)
    damaged = cache.fork(3).corrupt(fault)
    for row in range(3):
        assert same_bits(damaged.rows([row]), after(fault, cache, Draws(sample=row))[0])
