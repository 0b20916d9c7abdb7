"""Which slots a scope strikes, and on which random draws."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.faults import Distractor, Draws, Gaussian, NotANumber, Permuted, Scope, Zeros, bands
from kvprobe.faults.scope import EVERY_LAYER, named_bands
from tests.faults import HEADS, LAYERS, SEEDS, SLOTS, UNITS, WIDTH, after, same_bits, square_cache, struck_by
from tests.random_caches import NAMES, assert_bit_identical
from tests.refusals import refused

RATES = st.floats(0, 1)


def as_vectors(struck: tuple[Tensor, Tensor]) -> Tensor:
    """Which vectors hold a struck number, K and V, `[2, layers, heads, slots]`."""
    return torch.stack([part.any(-1) for part in struck])


@st.composite
def scopes(draw: st.DrawFn) -> Scope:
    """Any scope at rate 1, with single numbers or not."""
    strategies = {
        "layers": st.lists(st.integers(0, LAYERS - 1), min_size=1),
        "heads": st.lists(st.integers(0, HEADS - 1), min_size=1),
        "segments": st.lists(st.sampled_from(NAMES), min_size=1).map(tuple),
        "slots": st.lists(st.integers(0, SLOTS - 1), min_size=1),
    }
    chosen = {name: draw(st.none() | strategy) for name, strategy in strategies.items()}
    unit = draw(st.sampled_from(UNITS))
    return Scope(
        **chosen,
        unit=unit,
        parts=draw(st.sampled_from(["kv", "k", "v"])),
        among=draw(st.sampled_from(["all", "prompt", "generated"])),
        block=1 if unit == "number" else draw(st.sampled_from([1, 4, 5])),
    )


def by_hand(scope: Scope, cache: KVCache, part: str, layer: int, head: int, slot: int) -> bool:
    """Whether a slot is in scope, from the words of `Scope`."""
    ledger = cache.ledger
    number = int(ledger.segments[0, slot])
    if number < 0:
        return False
    name = ledger.names[number]
    return (
        part in scope.parts
        and (scope.layers is None or layer in scope.layers)
        and (scope.heads is None or head in scope.heads)
        and (scope.slots is None or slot in scope.slots)
        and (scope.segments is None or name in scope.segments)
        and (scope.among == "all" or (name == "generated") == (scope.among == "generated"))
    )


@given(scope=scopes(), seed=SEEDS, padded=st.booleans(), rename=st.booleans())
def test_rate_1_empties_the_scope_and_nothing_else(scope: Scope, seed: int, padded: bool, rename: bool):
    cache = square_cache(seed, padded=padded, some_masked=True)
    if rename and (scope.segments is None or "T2" not in scope.segments):
        names = (*NAMES[:-1], "generated")
        cache = KVCache.of(cache.keys, cache.values, type(cache.ledger)(**vars(cache.ledger) | {"names": names}))
    damaged, damage = after(Zeros(scope=scope), cache)
    count = 0
    for part, befores, afters in (("k", cache.keys, damaged.keys), ("v", cache.values, damaged.values)):
        expected = [before.clone() for before in befores]
        for layer, head, slot in itertools.product(range(LAYERS), range(HEADS), range(SLOTS)):
            if by_hand(scope, cache, part, layer, head, slot):
                expected[layer][0, head, slot] = 0
                count += 1
        assert all(map(torch.equal, afters, expected))
    assert damage.count.tolist() == [count]


@given(seed=SEEDS, rates=st.tuples(RATES, RATES), unit=st.sampled_from(UNITS), block=st.sampled_from([1, 4]))
def test_a_higher_rate_strikes_what_a_lower_one_does(seed: int, rates: tuple[float, float], unit: Any, block: int):
    cache, draws = square_cache(seed, padded=seed % 2 == 0), Draws(seed)
    block = 1 if unit == "number" else block
    less, more = (struck_by(Scope(rate=rate, unit=unit, block=block), cache, draws) for rate in sorted(rates))
    assert all(bool((few <= many).all()) for few, many in zip(less, more, strict=True))


@pytest.mark.parametrize(("unit", "rate"), itertools.product(UNITS, [0.03, 0.4]))
def test_the_rate_is_met_on_average_and_every_slot_is_as_likely(unit: Any, rate: float):
    cache, repeats = square_cache(0), 150
    hit = torch.zeros(2, LAYERS, HEADS, SLOTS)
    for repeat in range(repeats):
        struck = struck_by(Scope(rate=rate, unit=unit), cache, Draws(repeat=repeat))
        hit += torch.stack([part.float().mean(-1) for part in struck])
    # Five standard errors: the number struck is off its expectation by less than one, a slot is a coin.
    assert abs(float(hit.mean()) / repeats - rate) < 5 * 0.5 / SLOTS / repeats**0.5
    assert float((hit / repeats - rate).abs().max()) < 5 * (rate * (1 - rate) / repeats) ** 0.5


@given(seed=SEEDS, rate=RATES, unit=st.sampled_from(UNITS))
def test_two_faults_of_one_repeat_strike_the_same_numbers(seed: int, rate: float, unit: Any):
    cache, scope = square_cache(seed), Scope(rate=rate, unit=unit)
    expected = struck_by(scope, cache, Draws(repeat=3))
    for fault in (NotANumber(scope=scope), Gaussian("raw", scope=scope), Distractor(scope=scope)):
        damaged, _ = after(fault, cache, Draws(repeat=3))
        changed = (
            torch.stack([after[0] != before[0] for after, before in zip(damaged.keys, cache.keys, strict=True)]),
            torch.stack([after[0] != before[0] for after, before in zip(damaged.values, cache.values, strict=True)]),
        )
        assert all(map(torch.equal, changed, expected))


@pytest.mark.parametrize("unit", UNITS)
def test_seed_sample_repeat_and_step_each_draw_anew(unit: Any):
    cache, scope = square_cache(0), Scope(rate=0.5, unit=unit)
    drawn = [
        as_vectors(struck_by(scope, cache, draws, step))
        if unit != "number"
        else struck_by(scope, cache, draws, step)[0]
        for draws, step in [
            (Draws(), 0),
            (Draws(seed=1), 0),
            (Draws(sample=1), 0),
            (Draws(repeat=1), 0),
            (Draws(), 1),
            (Draws(1, 1), 0),
        ]
    ]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(drawn, 2))


@given(seed=SEEDS, rate=RATES, unit=st.sampled_from(UNITS), layers=st.sets(st.integers(0, LAYERS - 1), min_size=1))
def test_a_band_is_struck_where_the_whole_model_would_be(seed: int, rate: float, unit: Any, layers: set[int]):
    cache = square_cache(seed)
    whole = struck_by(Scope(rate=rate, unit=unit), cache)
    band = struck_by(Scope(rate=rate, unit=unit, layers=sorted(layers)), cache)
    inside = torch.tensor([layer in layers for layer in range(LAYERS)])[:, None, None, None]
    assert all(torch.equal(part, all_of_it & inside) for part, all_of_it in zip(band, whole, strict=True))


@given(seed=SEEDS, rate=RATES, unit=st.sampled_from(["slot", "layer", "head"]), head=st.integers(0, HEADS - 1))
def test_heads_and_parts_do_not_change_which_slots_are_drawn(seed: int, rate: float, unit: Any, head: int):
    cache = square_cache(seed)
    keys, values = struck_by(Scope(rate=rate, unit=unit), cache)
    only, none = struck_by(Scope(rate=rate, unit=unit, heads=[head], parts="k"), cache)
    inside = (torch.arange(HEADS) == head)[None, :, None, None]
    assert torch.equal(only, keys & inside)
    assert torch.equal(keys, values)
    assert not bool(none.any())


@pytest.mark.parametrize("count", [0, 1, 5, SLOTS, SLOTS + 9])
def test_a_count_is_met_exactly(count: int):
    cache = square_cache(0)
    expected = min(count, SLOTS)
    for unit in ("slot", "layer", "head"):
        for struck in struck_by(Scope(count=count, unit=unit), cache):
            assert struck.any(-1).sum(-1).eq(expected).all()
    for struck in struck_by(Scope(count=count, unit="number"), cache):
        assert struck.flatten(1).sum(1).eq(count).all()
    everything = HEADS * SLOTS * WIDTH
    for struck in struck_by(Scope(count=everything + 1, unit="number"), cache):
        assert struck.all()


def test_units_are_drawn_where_they_say():
    cache = square_cache(0)
    slot, layer, head = (as_vectors(struck_by(Scope(rate=0.5, unit=unit), cache)) for unit in ("slot", "layer", "head"))
    assert slot.eq(slot[:1, :1, :1]).all()
    assert layer.eq(layer[:1, :, :1]).all()
    assert not layer.eq(layer[:, :1]).all()
    assert head.eq(head[:1]).all()
    assert not head.eq(head[:, :, :1]).all()
    assert not head.eq(head[:, :1]).all()
    keys, values = struck_by(Scope(rate=0.5, unit="number"), cache)
    assert not torch.equal(keys, values)
    # Each number is drawn on its own: four standard deviations of a binomial.
    every = HEADS * SLOTS * WIDTH
    assert (torch.stack([keys, values]).flatten(2).sum(-1) - every / 2).abs().max() < 4 * (every / 4) ** 0.5


@given(seed=SEEDS, rate=RATES, block=st.integers(2, 7), unit=st.sampled_from(["slot", "layer", "head"]))
def test_blocks_are_struck_whole_and_counted_as_blocks(seed: int, rate: float, block: int, unit: Any):
    cache = square_cache(seed)
    struck = as_vectors(struck_by(Scope(rate=rate, block=block, unit=unit), cache, Draws(seed)))
    blocks = struck.split(block, -1)
    assert all(block_of_slots.eq(block_of_slots[..., :1]).all() for block_of_slots in blocks)
    number = torch.stack([block_of_slots[..., 0] for block_of_slots in blocks], -1).sum(-1)
    assert ((number - rate * len(blocks)).abs() < 1).all(), (
        "rounded up or down, each layer and head by a draw of its own"
    )


@given(seed=SEEDS, count=st.integers(1, 3))
def test_only_blocks_that_hold_something_in_scope_are_drawn(seed: int, count: int):
    cache = square_cache(seed)
    struck = as_vectors(struck_by(Scope(count=count, block=4, segments=("T1",)), cache, Draws(seed)))
    slots = struck[0, 0, 0].nonzero()[:, 0]
    inside = cache.ledger.in_segments(["T1"])[0].nonzero()[:, 0]
    assert set(slots.tolist()) <= set(inside.tolist())
    assert len(set((slots // 4).tolist())) == min(count, len(set((inside // 4).tolist())))


def test_a_segment_without_slots_leaves_nothing_to_strike():
    cache = square_cache(0).evict("T1")
    for scope in (Scope(segments=("T1",)), Scope(segments=("T1",), count=2), Scope(segments=("T1",), unit="number")):
        for fault in (Zeros(scope=scope), Permuted(scope=scope), Gaussian(scope=scope)):
            damaged, damage = after(fault, cache)
            assert_bit_identical(damaged, cache)
            assert damage.count.tolist() == [0]


def test_generated_slots_are_none_before_there_are_any():
    cache = square_cache(0)
    assert not as_vectors(struck_by(Scope(among="generated"), cache)).any()
    assert as_vectors(struck_by(Scope(among="prompt"), cache)).all()


@given(layers=st.integers(1, 90), data=st.data())
def test_bands_cut_all_layers_as_equally_as_possible(layers: int, data: st.DataObject):
    cut = bands(layers, data.draw(st.integers(1, layers)))
    assert [layer for band in cut for layer in band] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_bands_hold_every_layer_once():
    cut = named_bands(30, 4)
    assert [layer for name, band in cut.items() if name != EVERY_LAYER for layer in band] == list(range(30))
    assert cut[EVERY_LAYER] == tuple(range(30))
    assert list(named_bands(3, 6)) == ["0", "1", "2", EVERY_LAYER]


def test_28_layers_are_cut_into_the_four_reported_bands():
    assert bands(28, 4) == [range(0, 7), range(7, 14), range(14, 21), range(21, 28)]


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [
        ({"rate": 1.5}, "rate=1.5, a float; give a finite number from 0 to 1"),
        ({"rate": -0.1}, "rate=-0.1, a float; give a finite number from 0 to 1"),
        ({"rate": float("nan")}, "rate=nan, a float; give a finite number"),
        ({"rate": 0.5, "count": 2}, "count=2 and rate=0.5; give one of the two"),
        ({"count": -1}, "count=-1"),
        ({"rate": "0.1"}, "rate='0.1', a str; give a finite number"),
        ({"count": 0.5}, "count=0.5, a float; give a whole number"),
        ({"layers": []}, "Scope has no layers"),
        ({"layers": 3}, "Scope has layers=3, an int; give a list"),
        ({"layers": [1.0]}, "Scope has layers=[1.0]"),
        ({"heads": []}, "Scope has no heads"),
        ({"slots": []}, "Scope has no slots"),
        ({"block": 1.5}, "block=1.5"),
        ({"block": 0}, "block=0"),
        ({"block": 4, "unit": "number"}, "block=4 and unit='number'"),
        ({"parts": "x"}, "no choice of parts called 'x'"),
        ({"among": "promt"}, "did you mean 'prompt'"),
        ({"unit": "slots"}, "did you mean 'slot'"),
    ],
    ids=str,
)
def test_impossible_settings_of_a_scope_are_refused(unchecked: None, scope: dict[str, Any], sentence: str):
    refused(lambda: Scope(**scope), sentence)


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [
        ({"layers": [99]}, "There is no layer 99; the cache has layers 0 to 2."),
        ({"layers": [-1]}, "There is no layer -1; the cache has layers 0 to 2."),
        ({"heads": [2]}, "There is no KV head 2; the cache has KV heads 0 to 1."),
        ({"slots": [SLOTS]}, "There is no slot 22; the cache has slots 0 to 21."),
        ({"segments": ("T3",)}, "There is no segment called 'T3'; known are 'system', 'T1'"),
    ],
    ids=str,
)
def test_a_scope_beyond_the_cache_is_refused(scope: dict[str, Any], sentence: str):
    for unit in UNITS:
        refused(
            lambda unit=unit: after(Zeros(scope=Scope(**scope, unit=unit)), square_cache(0)),
            sentence.replace("(", r"\("),
        )


def test_segments_in_a_list_are_understood_as_layers_in_a_list_are(unchecked: None):
    cache, segments = square_cache(0), ["T1"]
    damaged, _ = after(Zeros(scope=Scope(segments=segments)), cache)  # pyright: ignore[reportArgumentType]
    assert same_bits(damaged, after(Zeros(scope=Scope(segments=("T1",))), cache)[0])


def test_a_scope_of_no_segments_is_refused_as_one_of_no_layers_is():
    refused(lambda: Scope(segments=()), "Scope has no segments")


@pytest.mark.parametrize("name", ["seed", "sample", "repeat"])
@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_draws_of_anything_but_whole_numbers_from_0_are_refused(unchecked: None, name: str, value: Any):
    refused(lambda: Draws(**{name: value}), f"Draws has {name}={value}, a", "give a whole number of at least 0.")
