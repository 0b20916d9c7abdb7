"""Properties of all faults, over the registry `tests.faults.EVERY`."""

from dataclasses import replace
from inspect import isabstract
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvprobe.faults.draws as draws_module
from kvprobe import faults
from kvprobe.cache.cache import KVCache
from kvprobe.faults import BitFlips, Draws, Fault, Fp8Saturation, Fp8Scale, NotANumber, QuantisationNoise, Zeros
from kvprobe.faults.draws import _drawn
from kvprobe.faults.strike import strike
from tests.faults import EVERY, SEEDS, UNITS, after, both, context_of, same_bits, square_cache, with_rate
from tests.random_caches import assert_bit_identical, copy_of


def test_the_registry_holds_every_fault():
    exported = [kind for kind in vars(faults).values() if isinstance(kind, type) and issubclass(kind, Fault)]
    assert {type(fault) for fault in EVERY} == {kind for kind in exported if not isabstract(kind)}


@pytest.mark.parametrize("fault", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_undo_restores_every_bit(fault: Fault, dtype: torch.dtype):
    cache = copy_of(square_cache(0, dtype=dtype).fork(3))
    cache.keys[0][0, 1, 5, 2] = -0.0
    layers = [{name: part.clone().contiguous() for name, part in layer.items()} for layer in cache.layers]
    context = context_of(square_cache(0, dtype=dtype))
    faults = [with_rate(fault, rate) for rate in (1.0, 0.5, 0.2)]
    draws = [Draws(repeat=repeat) for repeat in (0, 0, 1)]
    damage = strike(faults, draws, [2, 0, 1], layers, cache.ledger, context, remember=True)
    struck = KVCache(tuple(layers), cache.ledger)
    assert not same_bits(struck, cache)
    damage.undo()
    assert same_bits(struck, cache)


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_slots_that_are_not_struck_keep_their_bits_in_bfloat16(fault: Fault):
    cache = square_cache(0, dtype=torch.bfloat16)
    struck = with_rate(fault, 0.4, unit="slot")
    hit, _ = after(with_rate(Zeros(), 0.4, unit="slot", block=fault.scope.block), cache)
    damaged, damage = after(struck, cache)
    for (_, _, now), (_, _, zeroed), (_, _, before) in zip(both(damaged), both(hit), both(cache), strict=True):
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
    fine = KVCache.of(tuple(k.float() for k in coarse.keys), tuple(v.float() for v in coarse.values), coarse.ledger)
    context = context_of(coarse)
    donors = {
        name: KVCache.of(tuple(k.float() for k in donor.keys), tuple(v.float() for v in donor.values), donor.ledger)
        for name, donor in context.donors.items()
    }
    damaged, _ = after(fault, coarse, context=context)
    expected, _ = after(fault, fine, context=replace(context, cache=fine, donors=donors))
    for (_, _, now), (_, _, then) in zip(both(damaged), both(expected), strict=True):
        assert torch.allclose(now.float(), then, rtol=2**-7, atol=2**-7, equal_nan=True)


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_rate_0_changes_no_bit(fault: Fault):
    for seed in range(3):
        cache = square_cache(seed, padded=seed == 1, some_masked=seed == 2)
        damaged, damage = after(with_rate(fault, 0.0), cache, Draws(seed))
        assert_bit_identical(damaged, cache)
        assert int(damage.count[0]) == 0
        assert not damage.nonfinite


@settings(max_examples=6)
@given(seed=SEEDS, order=st.permutations(range(2 * len(EVERY))))
def test_rows_struck_together_are_rows_struck_alone(seed: int, order: list[int]):
    cache = square_cache(seed)
    context = context_of(cache)
    rng = torch.Generator().manual_seed(seed)
    conditions = []
    for number, fault in enumerate(EVERY + EVERY):
        rate, repeat, sample = float(torch.rand((), generator=rng)), number % 3, number % 2
        scope = [{}, {"layers": [1, 2]}, {"parts": "k"}, {"heads": [1]}][number % 4]
        conditions.append((with_rate(fault, rate, **scope), Draws(5, sample, repeat)))
    mixed = [conditions[place] for place in order]
    together, damage = after([fault for fault, _ in mixed], cache, [draws for _, draws in mixed], context, step=2)
    for row, (fault, draws) in enumerate(mixed):
        alone, damage_alone = after(fault, cache, draws, context_of(cache), step=2)
        assert same_bits(together.rows([row]), alone), (fault, draws)
        assert int(damage.count[row]) == int(damage_alone.count[0])
        assert damage.nonfinite.get(row) == damage_alone.nonfinite.get(0)


def test_draws_that_are_shared_are_never_written(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(*what: Any) -> Tensor:
        drawn = _drawn(*what)
        seen.append((drawn, drawn.clone()))
        return drawn

    monkeypatch.setattr(draws_module, "_drawn", watched)
    cache = square_cache(0)
    for unit in UNITS:
        faults = [
            with_rate(fault, 0.5, unit=unit) for fault in EVERY if unit != "number" or not hasattr(fault, "block")
        ]
        after(faults, cache)
    assert len(seen) > 100
    assert all(torch.equal(drawn, before) for drawn, before in seen)


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_corrupt_leaves_the_cache_and_those_that_share_its_storage(fault: Fault):
    cache = square_cache(3)
    kept, fork = copy_of(cache), cache.fork(2)
    context = context_of(cache)
    donors = {name: copy_of(donor) for name, donor in context.donors.items()}
    fork.corrupt(fault, contexts=[context, context])
    cache.corrupt(fault, contexts=[context])
    assert_bit_identical(cache, kept)
    assert_bit_identical(fork.rows([1]), kept)
    for name, before in donors.items():
        assert_bit_identical(context.donors[name], before)
