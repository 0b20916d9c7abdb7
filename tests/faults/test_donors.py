"""Faults that take slots of another cache."""

from dataclasses import replace

import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.faults import Distractor, Draws, FaultContext, ForeignBlock, Scope, Splice, StaleBlock, scaffold
from kvprobe.inference.model import Model
from tests.faults import HEADS, LAYERS, SLOTS, after, both, context_of, outlying, reindexed, same_bits, square_cache
from tests.random_caches import random_tokens
from tests.refusals import refused


@pytest.mark.parametrize("donor_slots", [SLOTS, 7, 40])
def test_a_distractor_gives_slot_for_slot_modulo_its_length(donor_slots: int):
    cache = square_cache(0)
    context = context_of(cache, donor_slots)
    damaged, _ = after(Distractor(scope=Scope(slots=range(3, SLOTS))), cache, context=context)
    donated = both(context.donor("distractor"))
    for (_, _, now), (_, _, theirs), (_, _, before) in zip(both(damaged), donated, both(cache), strict=True):
        assert torch.equal(now[:, :3], before[:, :3])
        for slot in range(3, SLOTS):
            assert torch.equal(now[:, slot], theirs[:, slot % donor_slots])


def test_padding_of_a_donor_is_never_used():
    cache = square_cache(0)
    donor = KVCache.join([square_cache(5, 6), square_cache(6, 12)]).rows([0])
    damaged, _ = after(Distractor(), cache, context=FaultContext(cache, {"distractor": donor}))
    for (_, _, now), (_, _, theirs) in zip(both(damaged), both(donor), strict=True):
        assert all(torch.equal(now[:, slot], theirs[:, slot % 6]) for slot in range(SLOTS))


@pytest.mark.parametrize("donor_slots", [SLOTS, 11])
def test_a_matched_distractor_has_this_caches_mean_and_deviation_in_every_channel(donor_slots: int):
    cache = square_cache(0)
    cache = cache.with_parts({"K": outlying(SLOTS).keys})
    context = context_of(cache, donor_slots)
    damaged, _ = after(Distractor(matched=True), cache, context=context)
    donated = both(context.donor("distractor"))
    for (_, _, now), (_, _, theirs), (_, _, before) in zip(both(damaged), donated, both(cache), strict=True):
        assert torch.allclose(now.mean(1), before.mean(1), atol=1e-4)
        assert torch.allclose(now.std(1, correction=0), before.std(1, correction=0), rtol=1e-4)
        # Moved and scaled, no more: in each channel the slots stand in the donor's order.
        assert torch.equal(now[:, :donor_slots].argsort(1), theirs.argsort(1))


@pytest.mark.parametrize("level", [0.0, 1.33, -17.3, 100.1])
def test_a_channel_that_never_varies_in_the_donor_becomes_the_caches_mean(level: float):
    cache = square_cache(0)
    context = context_of(cache)
    context.donor("distractor").keys[1][0, :, :, 3] = level
    damaged, _ = after(Distractor(matched=True), cache, context=context)
    before, now = cache.keys[1][0, :, :, 3], damaged.keys[1][0, :, :, 3]
    assert (now - before.mean(1, keepdim=True)).abs().max() < 0.1 * before.std(1).min()


def test_a_donor_may_have_any_name():
    cache = outlying(20)
    named = {name: FaultContext(cache, {name: square_cache(8, 20)}) for name in ("distractor", "clean")}
    damaged_caches = [
        after(Distractor(name, matched=True), cache, context=context)[0] for name, context in named.items()
    ]
    assert same_bits(*damaged_caches)


def test_a_foreign_block_is_the_donors_in_all_layers_heads_and_parts():
    cache, block = square_cache(0), 4
    context = context_of(cache)
    damaged, _ = after(ForeignBlock(block=block, scope=Scope(rate=0.5)), cache, context=context)
    foreign = []
    for (_, _, now), (_, _, theirs), (_, _, before) in zip(
        both(damaged), both(context.donor("distractor")), both(cache), strict=True
    ):
        taken = now.eq(theirs).all(-1)
        assert torch.equal(now[~taken], before[~taken])
        foreign.append(taken)
    slots = torch.stack(foreign)
    assert slots.eq(slots[0, 0]).all()
    assert 0 < slots[0, 0].sum() < SLOTS
    assert all(part.eq(part[0]).all() for part in slots[0, 0].split(block))


def test_a_stale_block_keeps_its_beginning_up_to_a_drawn_offset():
    cache, block = square_cache(0), 5
    context, starts = context_of(cache), set()
    for repeat in range(12):
        damaged, _ = after(StaleBlock(block=block), cache, Draws(repeat=repeat), context)
        theirs = both(context.donor("distractor"))
        stale = torch.stack(
            [now.eq(old).all(-1) for (_, _, now), (_, _, old) in zip(both(damaged), theirs, strict=True)]
        )
        fresh = torch.stack(
            [now.eq(before).all(-1) for (_, _, now), (_, _, before) in zip(both(damaged), both(cache), strict=True)]
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
    damaged, damage = after(Splice(above=2), cache, context=context)
    for (_, layer, now), (_, _, theirs), (_, _, before) in zip(
        both(damaged), both(context.donor("scaffold")), both(cache), strict=True
    ):
        assert torch.equal(now, theirs if layer >= 2 else before)
    assert damage.count.tolist() == [2 * HEADS * SLOTS]


def test_a_splice_above_the_last_layer_is_refused():
    refused(lambda: after(Splice(above=LAYERS), square_cache(0)), "layer")


def test_a_scaffold_keeps_delimiters_positions_and_length():
    tokens = replace(
        random_tokens(1, {"system": 4, "T1": 6}), delimiters=(True, False, False, True, True) + (False,) * 5
    )
    neutral = scaffold(tokens, [60, 61, 62])
    expected = [60, 61, 62, 60, 61, 62, 60]
    assert [token for token, delimiter in zip(neutral.ids, tokens.delimiters, strict=True) if not delimiter] == expected
    assert all(a == b for a, b, delimiter in zip(neutral.ids, tokens.ids, tokens.delimiters, strict=True) if delimiter)
    assert replace(neutral, ids=tokens.ids) == tokens
    refused(lambda: scaffold(tokens, []), "The scaffold has no filler; give at least one token")


def test_a_donors_keys_carry_its_positions_into_a_reindexed_cache(tiny_llama: Model):
    cache = tiny_llama.as_seen(reindexed(tiny_llama))
    donor = tiny_llama.prefill(random_tokens(5, {"distractor": cache.slots}))
    question = random_tokens(4, {"question": 3}, start=int(cache.ledger.following[0]))
    logits = tiny_llama.extend(
        cache.corrupt(Distractor(), contexts=[FaultContext(cache, {"distractor": donor})]), question
    )[1]
    expected = tiny_llama.extend(donor, question)[1]
    assert torch.allclose(logits, expected, atol=1e-4)
