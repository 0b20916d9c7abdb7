import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.rotary import Rotary, Rotation
from kvprobe.errors import UserError
from kvprobe.faults import (
    BitFlips,
    Distractor,
    Draws,
    Fault,
    FaultContext,
    ForeignBlock,
    Fp8Saturation,
    Fp8Scale,
    Gaussian,
    NonFinite,
    NotANumber,
    OverlappingKV,
    Permuted,
    PositionShift,
    QuantisationNoise,
    Scope,
    Splice,
    StaleBlock,
    WrongPointers,
    Zeros,
    scaffold,
)
from kvprobe.faults.gaussian import _TRIAL, effect, shares
from kvprobe.faults.strike import strike
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import prepare
from kvprobe.text.transcript import Tokens
from tests.faults import (
    EVERY,
    GROUP,
    HEADS,
    LAYERS,
    SLOTS,
    TOKENS,
    WIDTH,
    after,
    context_of,
    same_bits,
    square_cache,
    with_rate,
)
from tests.random_caches import PADDING, assert_bit_identical, copy_of, random_cache, random_tokens

PARTS = ("k", "v")


def both(cache: KVCache) -> list[tuple[str, int, Tensor]]:
    """Part, layer and `[heads, slots, d]` of a cache of one row."""
    pairs = zip(cache.keys, cache.values, strict=True)
    return [(part, layer, each[0]) for layer, pair in enumerate(pairs) for part, each in zip(PARTS, pair, strict=True)]


def outlying(slots: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache in which every layer, head and channel has a mean and a deviation of its own, and channels vary together."""
    cache = square_cache(0, slots, dtype=torch.float32)
    rng = torch.Generator().manual_seed(1)

    def shaped(tensor: Tensor) -> Tensor:
        mixing = torch.randn(HEADS, WIDTH, WIDTH, generator=rng)
        return (tensor @ mixing + 5 * torch.randn(1, HEADS, 1, WIDTH, generator=rng)).to(dtype)

    return KVCache(tuple(map(shaped, cache.keys)), tuple(map(shaped, cache.values)), cache.ledger)


# What every fault has in common.


@pytest.mark.parametrize("fault", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_undo_puts_back_every_bit(fault: Fault, dtype: torch.dtype):
    cache = copy_of(square_cache(0, dtype=dtype).fork(3))
    cache.keys[0][0, 1, 5, 2] = -0.0
    pairs = [(keys.clone(), values.clone()) for keys, values in zip(cache.keys, cache.values, strict=True)]
    pairs = [(keys.contiguous(), values.contiguous()) for keys, values in pairs]
    context = context_of(square_cache(0, dtype=dtype))
    faults = [with_rate(fault, rate) for rate in (1.0, 0.5, 0.2)]
    draws = [Draws(repeat=repeat) for repeat in (0, 0, 1)]
    damage = strike(faults, draws, [2, 0, 1], pairs, cache.ledger, context, remember=True)
    struck = KVCache(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs), cache.ledger)
    assert not same_bits(struck, cache)
    damage.undo()
    assert same_bits(struck, cache)


def test_damage_undone_in_turn_leaves_nothing_where_two_strikes_overlap():
    cache, context = square_cache(0), context_of(square_cache(0))
    pairs = [(keys.clone(), values.clone()) for keys, values in zip(cache.keys, cache.values, strict=True)]
    damages = [
        strike([fault], [Draws()], [0], pairs, cache.ledger, context, remember=True)
        for fault in (Gaussian("raw", scope=Scope(rate=0.6)), Zeros(scope=Scope(rate=0.4, unit="number")))
    ]
    for damage in reversed(damages):
        damage.undo()
    assert all(torch.equal(pair[0], before) for pair, before in zip(pairs, cache.keys, strict=True))
    assert all(torch.equal(pair[1], before) for pair, before in zip(pairs, cache.values, strict=True))


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_slots_that_are_not_struck_keep_their_bits_in_bfloat16(fault: Fault):
    cache = square_cache(0, dtype=torch.bfloat16)
    struck = with_rate(fault, 0.4, unit="slot")
    hit, _ = after(with_rate(Zeros(), 0.4, unit="slot", block=fault.scope.block), cache)
    found, damage = after(struck, cache)
    for (_, _, now), (_, _, zeroed), (_, _, before) in zip(both(found), both(hit), both(cache), strict=True):
        untouched = zeroed.ne(0).any(-1)
        assert untouched.any()
        assert not untouched.all()
        assert torch.equal(now[untouched], before[untouched])
    assert bool(damage.nonfinite) == isinstance(fault, NotANumber)


@pytest.mark.parametrize(
    "fault",
    [fault for fault in EVERY if not isinstance(fault, BitFlips | QuantisationNoise | Fp8Scale | Fp8Saturation)],
    ids=str,
)
def test_a_bfloat16_cache_is_damaged_as_in_fp32_but_for_rounding(fault: Fault):
    coarse = square_cache(0, dtype=torch.bfloat16)
    fine = KVCache(tuple(k.float() for k in coarse.keys), tuple(v.float() for v in coarse.values), coarse.ledger)
    context = context_of(coarse)
    donors = {
        name: KVCache(tuple(k.float() for k in each.keys), tuple(v.float() for v in each.values), each.ledger)
        for name, each in context.donors.items()
    }
    found, _ = after(fault, coarse, context=context)
    expected, _ = after(fault, fine, context=replace(context, cache=fine, donors=donors))
    for (_, _, now), (_, _, then) in zip(both(found), both(expected), strict=True):
        assert torch.allclose(now.float(), then, rtol=2**-7, atol=2**-7, equal_nan=True)


# Noise.


def moments_of(vectors: Tensor) -> tuple[Tensor, Tensor]:
    return vectors.mean(), vectors.std(correction=0)


def test_layer_noise_has_the_layers_mean_and_deviation_in_every_head_and_channel():
    cache = outlying(3000)
    found, _ = after(Gaussian("layer"), cache)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        mean, deviation = moments_of(before)
        assert (now.mean(1) - mean).abs().max() < 5 * deviation / 3000**0.5
        assert (now.std(1) / deviation - 1).abs().max() < 5 / 6000**0.5


def test_head_noise_has_each_heads_mean_and_deviation():
    cache = outlying(3000)
    found, _ = after(Gaussian("head"), cache)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        for head in range(HEADS):
            mean, deviation = moments_of(before[head])
            assert (now[head].mean(0) - mean).abs().max() < 5 * deviation / 3000**0.5
            assert (now[head].std(0) / deviation - 1).abs().max() < 5 / 6000**0.5


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_channel_noise_has_the_mean_and_covariance_of_each_heads_channels(scale: float):
    cache = outlying(6000)
    found, _ = after(Gaussian("channel", scale=scale), cache)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        for head in range(HEADS):
            expected = torch.cov(before[head].T.double(), correction=0) * scale**2
            deviation = expected.diagonal().sqrt()
            assert ((now[head].mean(0) - before[head].mean(0)).abs() < 5 * deviation / 6000**0.5).all()
            error = (torch.cov(now[head].T.double()) - expected) / torch.outer(deviation, deviation)
            assert error.abs().max() < 5 * (2 / 6000) ** 0.5


def test_channel_noise_stays_within_the_few_directions_of_a_short_cache():
    cache = square_cache(0, slots=4)
    found, _ = after(Gaussian("channel", scope=Scope(slots=[0, 1, 2])), cache)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        for head in range(HEADS):
            mean = before[head].mean(0)
            directions = torch.linalg.svd(before[head] - mean).Vh[3:]
            assert ((now[head, :3] - mean) @ directions.T).abs().max() < 1e-3


def test_raw_noise_is_white_and_its_scale_is_its_deviation():
    cache = outlying(3000)
    found, _ = after(Gaussian("raw", scale=3.0), cache)
    once, _ = after(Gaussian("raw"), cache)
    drawn = torch.stack([each for _, _, each in both(found)]).double()
    assert abs(float(drawn.mean())) < 5 * 3 / drawn.numel() ** 0.5
    assert abs(float(drawn.std()) / 3 - 1) < 5 / (2 * drawn.numel()) ** 0.5
    assert abs(float((drawn / 3).pow(4).mean()) - 3) < 0.05
    assert torch.allclose(drawn.float(), 3 * torch.stack([each for _, _, each in both(once)]))
    # K and V, layers and heads draw noise of their own.
    correlation = torch.corrcoef(drawn.flatten(0, 1).flatten(1)).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / (3000 * WIDTH) ** 0.5


def test_noise_without_deviation_is_the_mean():
    cache = outlying(40)
    found, _ = after(Gaussian("head", scale=0.0), cache)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
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
            each = []
            for head in range(heads):
                for query in range(GROUP):
                    asked = context.queries.rows[layer][head, token * GROUP + query]
                    weights = (keys[head] @ asked * context.queries.scale[layer]).softmax(0)
                    each.append(weights @ values[head])
            outputs.append(torch.cat(each))
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
def test_the_effect_of_noise_is_that_of_one_slot_replaced_at_a_time(part: Any, share: float):
    cache = random_cache(0, 1, 9, LAYERS, HEADS, WIDTH)
    context = FaultContext(cache, queries=context_of(square_cache(0)).queries)
    for layer in range(LAYERS):
        assert float(effect(context, layer, part, share)) == pytest.approx(
            effect_by_hand(context, layer, part, share), rel=1e-3
        )


@pytest.mark.parametrize("part", PARTS)
def test_shares_make_the_effect_that_of_the_geometric_mean_in_every_layer(part: Any):
    cache = square_cache(0)
    scales = (1.0, 3.0, 0.5)
    cache = replace(cache, keys=tuple(scale * each for scale, each in zip(scales, cache.keys, strict=True)))
    context = context_of(cache)
    whole = torch.stack([effect(context, layer, part, 1.0) for layer in range(LAYERS)])
    target = float(whole.log().mean().exp())
    for layer, share in enumerate(shares(context, part)):
        assert float(effect(context, layer, part, share)) == pytest.approx(target, rel=1e-3)


def test_noise_matched_by_its_effect_is_layer_noise_mixed_in_by_its_share():
    cache = square_cache(0)
    context = context_of(cache)
    scope = Scope(rate=0.5)
    found, _ = after(Gaussian("effect", scale=0.5, scope=scope), cache, context=context)
    noise, _ = after(Gaussian("layer", scope=scope), cache, context=context)
    for (part, layer, now), (_, _, replaced), (_, _, before) in zip(both(found), both(noise), both(cache), strict=True):
        share = 0.5 * shares(context, part)[layer]  # pyright: ignore[reportArgumentType]
        assert torch.allclose(now, before + share * (replaced - before), atol=1e-5)


def test_what_a_host_has_worked_out_is_its_own():
    one, other = (context_of(outlying(20 + extra)) for extra in (0, 5))
    scaled = replace(other, cache=replace(other.cache, keys=tuple(2 * each for each in other.cache.keys)))
    for how in ("layer", "head", "channel", "effect"):
        first = [after(Gaussian(how), context.cache, context=context)[0] for context in (one, other, scaled)]
        fresh = [after(Gaussian(how), context.cache, context=replace(context))[0] for context in (one, other, scaled)]
        assert all(map(same_bits, first, fresh))


# Slots of others.


@pytest.mark.parametrize("donor_slots", [SLOTS, 7, 40])
def test_a_distractor_gives_slot_for_slot_and_counts_round_where_it_is_shorter(donor_slots: int):
    cache = square_cache(0)
    context = context_of(cache, donor_slots)
    found, _ = after(Distractor(scope=Scope(slots=range(3, SLOTS))), cache, context=context)
    donated = both(context.donor("distractor"))
    for (_, _, now), (_, _, theirs), (_, _, before) in zip(both(found), donated, both(cache), strict=True):
        assert torch.equal(now[:, :3], before[:, :3])
        for slot in range(3, SLOTS):
            assert torch.equal(now[:, slot], theirs[:, slot % donor_slots])


def test_padding_of_a_donor_is_never_given():
    cache = square_cache(0)
    donor = KVCache.join([square_cache(5, 6), square_cache(6, 12)]).rows([0])
    found, _ = after(Distractor(), cache, context=FaultContext(cache, {"distractor": donor}))
    for (_, _, now), (_, _, theirs) in zip(both(found), both(donor), strict=True):
        assert all(torch.equal(now[:, slot], theirs[:, slot % 6]) for slot in range(SLOTS))


@pytest.mark.parametrize("donor_slots", [SLOTS, 11])
def test_a_matched_distractor_has_this_caches_mean_and_deviation_in_every_channel(donor_slots: int):
    cache = square_cache(0)
    cache = replace(cache, keys=outlying(SLOTS).keys)
    context = context_of(cache, donor_slots)
    found, _ = after(Distractor(matched=True), cache, context=context)
    donated = both(context.donor("distractor"))
    for (_, _, now), (_, _, theirs), (_, _, before) in zip(both(found), donated, both(cache), strict=True):
        assert torch.allclose(now.mean(1), before.mean(1), atol=1e-4)
        assert torch.allclose(now.std(1, correction=0), before.std(1, correction=0), rtol=1e-4)
        # Moved and scaled, no more: in each channel the slots stand in the donor's order.
        assert torch.equal(now[:, :donor_slots].argsort(1), theirs.argsort(1))


@pytest.mark.parametrize("level", [0.0, 1.33, -17.3, 100.1])
def test_a_channel_that_never_varies_in_the_donor_becomes_the_caches_mean(level: float):
    cache = square_cache(0)
    context = context_of(cache)
    context.donor("distractor").keys[1][0, :, :, 3] = level
    found, _ = after(Distractor(matched=True), cache, context=context)
    before, now = cache.keys[1][0, :, :, 3], found.keys[1][0, :, :, 3]
    assert (now - before.mean(1, keepdim=True)).abs().max() < 0.1 * before.std(1).min()


def test_a_donor_may_have_any_name():
    cache = outlying(20)
    named = {name: FaultContext(cache, {name: square_cache(8, 20)}) for name in ("distractor", "clean")}
    found = [after(Distractor(name, matched=True), cache, context=context)[0] for name, context in named.items()]
    assert same_bits(*found)


def test_a_foreign_block_is_the_donors_in_all_layers_heads_and_parts():
    cache, block = square_cache(0), 4
    context = context_of(cache)
    found, _ = after(ForeignBlock(block=block, scope=Scope(rate=0.5)), cache, context=context)
    foreign = []
    for (_, _, now), (_, _, theirs), (_, _, before) in zip(
        both(found), both(context.donor("distractor")), both(cache), strict=True
    ):
        taken = now.eq(theirs).all(-1)
        assert torch.equal(now[~taken], before[~taken])
        foreign.append(taken)
    slots = torch.stack(foreign)
    assert slots.eq(slots[0, 0]).all()
    assert 0 < slots[0, 0].sum() < SLOTS
    assert all(part.eq(part[0]).all() for part in slots[0, 0].split(block))


def test_a_stale_block_keeps_its_beginning_from_which_an_offset_is_drawn():
    cache, block = square_cache(0), 5
    context, starts = context_of(cache), set()
    for repeat in range(12):
        found, _ = after(StaleBlock(block=block), cache, Draws(repeat=repeat), context)
        theirs = both(context.donor("distractor"))
        stale = torch.stack([now.eq(old).all(-1) for (_, _, now), (_, _, old) in zip(both(found), theirs, strict=True)])
        fresh = torch.stack(
            [now.eq(own).all(-1) for (_, _, now), (_, _, own) in zip(both(found), both(cache), strict=True)]
        )
        assert torch.equal(stale, ~fresh)
        assert stale.eq(stale[0, 0]).all(), "one block table for all layers and heads"
        for part in stale[0, 0].split(block)[:-1]:
            start = block - int(part.sum())
            assert part.tolist() == [False] * start + [True] * (block - start)
            starts.add(start)
    assert starts == set(range(block))


def test_a_splice_reaches_only_the_layers_above():
    cache = square_cache(0)
    context = context_of(cache)
    found, damage = after(Splice(above=2), cache, context=context)
    for (_, layer, now), (_, _, theirs), (_, _, own) in zip(
        both(found), both(context.donor("scaffold")), both(cache), strict=True
    ):
        assert torch.equal(now, theirs if layer >= 2 else own)
    assert damage.count.tolist() == [2 * HEADS * SLOTS]


def test_a_splice_above_the_last_layer_is_refused_as_layer_99_is():
    with pytest.raises(UserError, match="layer"):
        after(Splice(above=LAYERS), square_cache(0))


def test_a_scaffold_keeps_delimiters_positions_and_length():
    tokens = replace(
        random_tokens(1, {"system": 4, "T1": 6}), delimiters=(True, False, False, True, True) + (False,) * 5
    )
    neutral = scaffold(tokens, [60, 61, 62])
    expected = [60, 61, 62, 60, 61, 62, 60]
    assert [each for each, own in zip(neutral.ids, tokens.delimiters, strict=True) if not own] == expected
    assert all(a == b for a, b, own in zip(neutral.ids, tokens.ids, tokens.delimiters, strict=True) if own)
    assert replace(neutral, ids=tokens.ids) == tokens
    with pytest.raises(UserError, match="The scaffold has no filler; give at least one token"):
        scaffold(tokens, [])


# Slots that change places.


def order_of(now: Tensor, before: Tensor) -> list[int | None]:
    """From which slot each vector came."""
    same = now[:, None].eq(before[None]).all(-1)
    return [int(row.nonzero()[0, 0]) if bool(row.any()) else None for row in same]


@given(seed=st.integers(0, 2**31), rate=st.floats(0, 1), unit=st.sampled_from(["slot", "layer", "head"]))
def test_a_permutation_moves_every_struck_slot_among_the_struck(seed: int, rate: float, unit: Any):
    cache, scope, draws = square_cache(seed), Scope(rate=rate, unit=unit), Draws(seed)
    found, _ = after(Permuted(scope=scope), cache, draws)
    zeroed, _ = after(Zeros(scope=scope), cache, draws)
    orders: dict[tuple[int, int], list[Any]] = {}
    for (_, layer, now), (_, _, hit), (_, _, before) in zip(both(found), both(zeroed), both(cache), strict=True):
        for head in range(HEADS):
            struck = hit[head].eq(0).all(-1).nonzero()[:, 0].tolist()
            order = order_of(now[head], before[head])
            assert sorted(order) == list(range(SLOTS))
            moved = [slot for slot in range(SLOTS) if order[slot] != slot]
            assert moved == (struck if len(struck) > 1 else [])
            # K and V change places together.
            assert orders.setdefault((layer, head), order) == order


def test_layers_and_heads_are_permuted_apart():
    cache = square_cache(0)
    found, _ = after(Permuted(), cache)
    orders = [
        order_of(now[head], before[head])
        for (part, _, now), (_, _, before) in zip(both(found), both(cache), strict=True)
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
    found, _ = after(WrongPointers(block=block, scope=scope), cache, draws)
    hit, _ = after(Zeros(scope=replace(scope, block=block)), cache, draws)
    first = hit.keys[0][0, 0].eq(0).all(-1)
    whole = [number for number in range(slots // block) if first[number * block]]
    orders = [
        order_of(now[head], before[head])
        for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True)
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
        found, _ = after(WrongPointers("repeated", block=block), cache, Draws(repeat=repeat))
        orders = [
            order_of(now[head], before[head])
            for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True)
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
    found, _ = after(WrongPointers("repeated", block=block), longer, context=context)
    order = order_of(found.keys[1][0, 1], longer.keys[1][0, 1])
    assert set(order) == set(range(8))


def test_a_repeated_block_is_never_ones_own_though_padding_stands_before_it():
    """A row that ended early in a batch, and was read on, has padding between what it read."""
    block, cache = 4, square_cache(0, slots=20)
    segments = cache.ledger.segments.clone()
    segments[0, 4:8] = PADDING
    cache = replace(cache, ledger=replace(cache.ledger, segments=segments))
    for repeat in range(10):
        found, damage = after(WrongPointers("repeated", block=block), cache, Draws(repeat=repeat))
        assert damage.count.tolist() == [2 * LAYERS * HEADS * 16]
        order = order_of(found.keys[1][0, 1], cache.keys[1][0, 1])
        own = [slot for slot, source in enumerate(order) if source == slot and not 4 <= slot < 8]
        assert not own, f"slots {own} were struck and hold what they held"


@pytest.mark.parametrize("pointing", ["swapped", "repeated"])
def test_a_prompt_of_one_block_has_no_other_to_point_at(pointing: Any):
    cache = square_cache(0, slots=6)
    found, _ = after(WrongPointers(pointing, block=4), cache)
    assert_bit_identical(found, cache)


def test_a_block_of_which_only_some_slots_are_in_scope_has_no_pointer_to_go_wrong():
    cache = square_cache(0)
    found, _ = after(WrongPointers(block=8, scope=Scope(slots=range(4, 20))), cache)
    assert_bit_identical(found, cache)


@pytest.mark.parametrize("last", PARTS)
def test_overlapping_pages_read_the_same_for_k_and_v(last: Any):
    cache = square_cache(0)
    found, _ = after(OverlappingKV(last=last, block=4, scope=Scope(count=2)), cache)
    written = cache.keys if last == "k" else cache.values
    for layer in range(LAYERS):
        same = found.keys[layer][0].eq(found.values[layer][0]).all(-1)
        assert same.sum(-1).tolist() in ([8, 8], [6, 6])
        for now, before in ((found.keys, cache.keys), (found.values, cache.values)):
            assert torch.equal(now[layer][0][same], written[layer][0][same])
            assert torch.equal(now[layer][0][~same], before[layer][0][~same])


def test_pages_of_unequal_size_do_not_overlap():
    cache = random_cache(0, 1)
    with pytest.raises(UserError, match="Keys have 4 numbers and values 5; OverlappingKV needs equal widths"):
        cache.corrupt(OverlappingKV(block=4))


# Positions.


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("by", [-5, 1, 400])
def test_a_shift_turns_struck_keys_and_nothing_else(layout: Any, by: int):
    cache = square_cache(0, gaps=True)
    rotary = Rotary(torch.tensor([1.0, 0.1, 0.01]), layout)
    context = FaultContext(cache, rotaries=(rotary, None, rotary))
    slots = [2, 5, 21]
    found, _ = after(PositionShift(by=by, scope=Scope(slots=slots)), cache, context=context)
    for (part, layer, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        expected = before.clone()
        if part == "k" and layer != 1:
            for head, slot, pair in itertools.product(range(HEADS), slots, range(3)):
                one, other = (pair, pair + 3) if layout == "half" else (2 * pair, 2 * pair + 1)
                turn = torch.polar(torch.tensor(1.0), by * rotary.frequencies[pair])
                turned = torch.complex(before[head, slot, one], before[head, slot, other]) * turn
                expected[head, slot, one], expected[head, slot, other] = turned.real, turned.imag
        assert torch.allclose(now, expected, atol=2e-4)
        assert part == "k" or torch.equal(now, before)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "mixtral"])
def test_a_shifted_key_is_the_one_that_the_model_makes_at_that_position(tiny_models: dict[str, Model], name: str):
    """A single token sees only itself, so its keys at two positions differ by the turn alone, in every layer."""
    model = tiny_models[name]
    here, there = (model.prefill(Tokens.of([11], "T1", position)) for position in (4, 17))
    fault = PositionShift(by=13)
    found = here.corrupt(fault, contexts=[prepare(model.lanes, here, [fault])])
    for now, expected in zip(found.keys, there.keys, strict=True):
        assert torch.allclose(now, expected, atol=1e-5)
    assert all(map(torch.equal, found.values, here.values))


def test_a_model_with_learned_positions_has_no_keys_to_turn(tiny_models: dict[str, Model]):
    model = tiny_models["gpt2"]
    with pytest.raises(UserError, match="learned positions"):
        prepare(model.lanes, model.prefill(Tokens.of([1, 2])), [PositionShift(by=1)])


def reindexed(model: Model) -> KVCache:
    tokens = random_tokens(3, {"system": 4, "T1": 6, "T2": 8})
    return model.prefill(tokens).evict("T1").reindex("contiguous")


def test_a_reindexed_cache_is_refused_until_its_keys_are_turned(tiny_llama: Model):
    assert "Model.as_seen" in refusal(lambda: reindexed(tiny_llama).corrupt(Zeros()))


@pytest.mark.parametrize("fault", [Permuted(), WrongPointers(block=4)], ids=str)
def test_exchanging_whole_slots_of_a_reindexed_cache_changes_nothing(tiny_llama: Model, fault: Fault):
    """The control that `Permuted` and `WrongPointers` promise, on the cache that every eviction policy leaves behind."""
    cache = tiny_llama.as_seen(reindexed(tiny_llama))
    question = random_tokens(4, {"question": 3}, start=int(cache.ledger.following[0]))
    expected = tiny_llama.extend(cache, question)[1]
    found = tiny_llama.extend(cache.corrupt(fault), question)[1]
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_donors_keys_carry_its_positions_into_a_reindexed_cache(tiny_llama: Model):
    cache = tiny_llama.as_seen(reindexed(tiny_llama))
    donor = tiny_llama.prefill(random_tokens(5, {"distractor": cache.slots}))
    question = random_tokens(4, {"question": 3}, start=int(cache.ledger.following[0]))
    found = tiny_llama.extend(
        cache.corrupt(Distractor(), contexts=[FaultContext(cache, {"distractor": donor})]), question
    )[1]
    expected = tiny_llama.extend(donor, question)[1]
    assert torch.allclose(found, expected, atol=1e-4)


# Precision.

FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize(("kind", "factor"), itertools.product(FP8, [0.5, 1.0, 2.0]))
def test_fp8_is_a_cast_at_one_scale_for_each_layer_and_part_read_at_a_factor(kind: Any, factor: float):
    cache = outlying(SLOTS)
    dtype, limit = FP8[kind]
    found, _ = after(Fp8Scale(factor, kind, scope=Scope(slots=range(5))), cache)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        scale = before.abs().max() / limit
        expected = (before / scale).clamp(-limit, limit).to(dtype).float() * scale * factor
        assert torch.allclose(now[:, :5], expected[:, :5], rtol=1e-6)
        assert torch.equal(now[:, 5:], before[:, 5:])
        assert not torch.equal(now[:, :5], factor * before[:, :5])


@pytest.mark.parametrize(("kind", "room"), itertools.product(FP8, [0.1, 0.5, 1.0]))
def test_fp8_without_room_saturates_at_the_room_and_rounds_the_rest(kind: Any, room: float):
    cache = outlying(SLOTS)
    found, _ = after(Fp8Saturation(room, kind), cache)
    coarse = {"e4m3": 2**-4, "e5m2": 2**-3}[kind]
    saturated = 0
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
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
    found, _ = after(QuantisationNoise(bits, group, scope=Scope(rate=0.7)), cache)
    width = min(group, WIDTH)
    for (_, _, now), (_, _, before) in zip(both(found), both(cache), strict=True):
        groups = before.unflatten(-1, (-1, width))
        step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
        # Scale and minimum are kept in float16.
        allowed = step / 2 + 2**-9 * groups.abs().amax(-1)
        error = (now.unflatten(-1, (-1, width)) - groups).abs().amax(-1)
        assert (error <= allowed).all()


def test_one_bit_leaves_two_numbers_to_a_group():
    found, _ = after(QuantisationNoise(1, 4), square_cache(0))
    for _, _, now in both(found):
        assert all(len(each.unique()) == 2 for each in now.unflatten(-1, (-1, 4)).flatten(0, 2))


# Numbers that are none.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", PARTS)
def test_what_is_no_number_is_found_where_it_stands(value: float, part: Any):
    scope = Scope(layers=[1], heads=[1], slots=[7, 9], parts=part)
    found, damage = after(NotANumber(value, scope=scope), square_cache(0), step=3)
    assert damage.nonfinite == {0: NonFinite(part, 1, 1, 7, 3)}
    assert str(damage.nonfinite[0]) == f"{part.upper()} of layer 1, KV head 1, slot 7"
    bad = (found.keys if part == "k" else found.values)[1][0, 1]
    assert not bad[[7, 9]].isfinite().any()
    assert sum(int((~each.isfinite()).sum()) for _, _, each in both(found)) == 2 * WIDTH


def test_a_single_nan_number_is_found():
    _, damage = after(NotANumber(scope=Scope(count=1, unit="number", layers=[2], parts="v")), square_cache(0))
    assert damage.nonfinite[0].layer == 2
    assert damage.nonfinite[0].part == "v"
    assert damage.count.tolist() == [1]


def test_numbers_whose_sum_overflows_are_not_broken():
    cache = square_cache(0, dtype=torch.float16)
    for each in cache.keys + cache.values:
        each.fill_(6e4)
    found, damage = after(Permuted(), cache)
    assert not damage.nonfinite
    assert same_bits(found, cache)


# Refusals.


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError, match=r".") as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Zeros(at=-1), "Zeros has at=-1; it must be 'every', or a step, 0 or more."),
        (lambda: Zeros(at="always"), "at='always'; it must be 'every'"),
        (lambda: Gaussian("leyer"), "did you mean 'layer'"),
        (lambda: Gaussian(scale=-1.0), "scale=-1.0; it must be 0 or more"),
        (lambda: Gaussian(scale=float("inf")), "scale=inf; it must be 0 or more"),
        (lambda: Gaussian(scale=float("nan")), "scale=nan; it must be 0 or more"),
        (lambda: WrongPointers("swaped"), "did you mean 'swapped'"),
        (lambda: WrongPointers(block=0), "WrongPointers has block=0; it must be at least 1."),
        (lambda: StaleBlock(block=-4), "StaleBlock has block=-4; it must be at least 1."),
        (lambda: OverlappingKV(last="K"), "'K'"),
        (lambda: Splice(above=-1), "above=-1; it must be a layer, 0 or more"),
        (lambda: Fp8Scale(0.0), "Fp8Scale has factor=0.0; it must be above 0."),
        (lambda: Fp8Saturation(float("nan")), "Fp8Saturation has room=nan; it must be above 0."),
        (lambda: Fp8Scale(1.0, "e4m4"), "did you mean 'e4m3'"),
        (lambda: QuantisationNoise(9), "1 to 8 bits"),
        (lambda: QuantisationNoise(4, 0), "groups of at least 1"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(unchecked: None, make: Callable[[], Fault], sentence: str):
    assert sentence in refusal(make)


def test_what_a_fault_lacks_is_said_in_one_sentence():
    cache = square_cache(0)
    bare = FaultContext(cache, {"other": square_cache(1)})
    short = FaultContext(cache, {"scaffold": square_cache(1, SLOTS - 1)})
    assert "no donor called 'distractor'; known are 'other'" in refusal(
        lambda: after(Distractor(), cache, context=bare)
    )
    assert "no donor called 'scaffold'" in refusal(lambda: after(Splice(above=0), cache, context=bare))
    assert "no donor called 'distractor'" in refusal(lambda: cache.corrupt(StaleBlock(block=4)))
    assert "no rotary frequencies" in refusal(lambda: after(PositionShift(by=1), cache, context=bare))
    assert "needs the fault context's queries" in refusal(lambda: after(Gaussian("effect"), cache, context=bare))
    assert "has 21 slots and the cache 22" in refusal(lambda: after(Splice(above=0), cache, context=short))
    assert "cannot be quantised in groups of 3; give a divisor" in refusal(
        lambda: after(QuantisationNoise(4, 3), cache)
    )


def test_a_way_out_that_a_refusal_names_exists():
    cache = square_cache(0)
    for fault in (PositionShift(by=1), Gaussian("effect")):
        sentence = refusal(lambda fault=fault: after(fault, cache, context=FaultContext(cache)))
        for name in re.findall(r"Model\.(\w+)", sentence):
            assert hasattr(Model, name), sentence


def test_hosts_and_donors_of_several_rows_or_another_shape_are_refused():
    cache = square_cache(0)
    assert "one row; this cache has 2. Take one with KVCache.rows" in refusal(lambda: FaultContext(cache.fork(2)))
    assert "Donor 'd' has 2 rows" in refusal(lambda: FaultContext(cache, {"d": cache.fork(2)}))
    assert "expected 1 row of (3, 2, 8, 8)" in refusal(lambda: FaultContext(cache, {"d": square_cache(0, n_layers=2)}))


def test_as_many_hosts_and_draws_as_rows():
    cache = square_cache(0).fork(2)
    contexts = [FaultContext(cache.rows([0]))] * 2
    assert "2 rows, but there are 1 fault contexts and 2 draws" in refusal(
        lambda: cache.corrupt(Zeros(), contexts=contexts[:1])
    )
    assert "2 rows, but there are 2 fault contexts and 3 draws" in refusal(
        lambda: cache.corrupt(Zeros(), draws=[Draws()] * 3)
    )


def test_a_fault_shows_what_is_unusual_about_it():
    assert str(Gaussian("channel", scale=2.0, at="every")) == "Gaussian(at=every, matched=channel, scale=2.0)"
    assert str(Zeros()) == "Zeros()"
    assert str(Splice(above=3, scope=Scope(rate=0.5))) == "Splice(scope=Scope(rate=0.5), above=3)"


def test_turn_is_the_librarys_own():
    """A shift of the whole cache is `Turn` of the whole cache."""
    cache = square_cache(0)
    context = context_of(cache)
    assert context.rotaries is not None
    assert context.rotaries[0] is not None
    found, _ = after(PositionShift(by=6), cache, context=context)
    turn = Rotation.between(context.rotaries[0], cache.ledger.positions, cache.ledger.positions + 6)
    assert all(torch.equal(now, turn.of(before)) for now, before in zip(found.keys, cache.keys, strict=True))
