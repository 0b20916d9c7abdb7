import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvprobe.faults.draws as draws_module
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.faults import (
    BitFlips,
    Distractor,
    Draws,
    Fault,
    Gaussian,
    NotANumber,
    OverlappingKV,
    Permuted,
    Scope,
    WrongPointers,
    Zeros,
    bands,
)
from kvprobe.faults.draws import _drawn
from tests.faults import (
    EVERY,
    HEADS,
    LAYERS,
    SLOTS,
    WIDTH,
    after,
    context_of,
    same_bits,
    square_cache,
    struck_by,
    with_rate,
)
from tests.random_caches import NAMES, assert_bit_identical, copy_of

UNITS = ("slot", "layer", "head", "number")
SEEDS = st.integers(0, 2**31)
RATES = st.floats(0, 1)


def as_vectors(struck: tuple[Tensor, Tensor]) -> Tensor:
    """Which vectors hold a struck number, K and V, `[2, layers, heads, slots]`."""
    return torch.stack([each.any(-1) for each in struck])


@pytest.mark.parametrize("fault", EVERY, ids=str)
def test_rate_0_changes_no_bit(fault: Fault):
    for seed in range(3):
        cache = square_cache(seed, padded=seed == 1, some_masked=seed == 2)
        found, damage = after(with_rate(fault, 0.0), cache, Draws(seed))
        assert_bit_identical(found, cache)
        assert int(damage.count[0]) == 0
        assert not damage.nonfinite


@st.composite
def scopes(draw: st.DrawFn) -> Scope:
    """Any scope at rate 1, with single numbers or not."""
    some = {
        "layers": st.lists(st.integers(0, LAYERS - 1), min_size=1),
        "heads": st.lists(st.integers(0, HEADS - 1), min_size=1),
        "segments": st.lists(st.sampled_from(NAMES), min_size=1).map(tuple),
        "slots": st.lists(st.integers(0, SLOTS - 1), min_size=1),
    }
    chosen = {name: draw(st.none() | strategy) for name, strategy in some.items()}
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
        cache = KVCache(cache.keys, cache.values, type(cache.ledger)(**vars(cache.ledger) | {"names": names}))
    found, damage = after(Zeros(scope=scope), cache)
    count = 0
    for part, befores, afters in (("k", cache.keys, found.keys), ("v", cache.values, found.values)):
        expected = [each.clone() for each in befores]
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
        hit += torch.stack([each.float().mean(-1) for each in struck])
    # Five standard errors: the number struck is off its expectation by less than one, a slot is a coin.
    assert abs(float(hit.mean()) / repeats - rate) < 5 * 0.5 / SLOTS / repeats**0.5
    assert float((hit / repeats - rate).abs().max()) < 5 * (rate * (1 - rate) / repeats) ** 0.5


@given(seed=SEEDS, rate=RATES, unit=st.sampled_from(UNITS))
def test_two_faults_of_one_repeat_strike_the_same_numbers(seed: int, rate: float, unit: Any):
    cache, scope = square_cache(seed), Scope(rate=rate, unit=unit)
    expected = struck_by(scope, cache, Draws(repeat=3))
    for fault in (NotANumber(scope=scope), Gaussian("raw", scope=scope), Distractor(scope=scope)):
        found, _ = after(fault, cache, Draws(repeat=3))
        changed = (
            torch.stack([after[0] != before[0] for after, before in zip(found.keys, cache.keys, strict=True)]),
            torch.stack([after[0] != before[0] for after, before in zip(found.values, cache.values, strict=True)]),
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
        for found in struck_by(Scope(count=count, unit=unit), cache):
            assert found.any(-1).sum(-1).eq(expected).all()
    for found in struck_by(Scope(count=count, unit="number"), cache):
        assert found.flatten(1).sum(1).eq(count).all()
    everything = HEADS * SLOTS * WIDTH
    for found in struck_by(Scope(count=everything + 1, unit="number"), cache):
        assert found.all()


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
    assert all(each.eq(each[..., :1]).all() for each in blocks)
    number = torch.stack([each[..., 0] for each in blocks], -1).sum(-1)
    assert ((number - rate * len(blocks)).abs() < 1).all(), (
        "rounded up or down, each layer and head by a lot of its own"
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
            found, damage = after(fault, cache)
            assert_bit_identical(found, cache)
            assert damage.count.tolist() == [0]


def test_generated_slots_are_none_before_there_are_any():
    cache = square_cache(0)
    assert not as_vectors(struck_by(Scope(among="generated"), cache)).any()
    assert as_vectors(struck_by(Scope(among="prompt"), cache)).all()


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
        alone, own = after(fault, cache, draws, context_of(cache), step=2)
        assert same_bits(together.rows([row]), alone), (fault, draws)
        assert int(damage.count[row]) == int(own.count[0])
        assert damage.nonfinite.get(row) == own.nonfinite.get(0)


@pytest.mark.parametrize("how", ["layer", "head", "channel", "effect"])
def test_rows_of_one_operator_struck_together_are_rows_struck_alone_at_real_widths(how: Any):
    cache = square_cache(1, slots=90, d_head=64)
    context = context_of(cache)
    faults = [Gaussian(how, scope=Scope(rate=rate, unit=unit)) for rate in (0.02, 0.3, 1.0) for unit in UNITS]
    together, _ = after(faults, cache, context=context)
    for row, fault in enumerate(faults):
        assert same_bits(together.rows([row]), after(fault, cache, context=context)[0]), fault


def test_a_row_of_a_padded_batch_is_damaged_as_it_is_alone():
    short, long = square_cache(1, slots=9), square_cache(2, slots=SLOTS)
    both = KVCache.join([short, long])
    draws = [Draws(sample=4), Draws(sample=5)]
    for fault in (Zeros(scope=Scope(rate=0.4)), Zeros(scope=Scope(rate=0.4, unit="head")), Gaussian("raw")):
        found = both.corrupt(fault, draws=draws)
        for row, cache in enumerate((short, long)):
            alone = cache.corrupt(fault, draws=draws[row : row + 1])
            held = slice(0, cache.slots)
            for mine, own in zip(found.keys + found.values, alone.keys + alone.values, strict=True):
                assert torch.equal(mine[row, :, held], own[0]), (fault, row)


def test_nobody_writes_into_lots_that_are_shared(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(*what: Any) -> Tensor:
        drawn = _drawn(*what)
        seen.append((drawn, drawn.clone()))
        return drawn

    monkeypatch.setattr(draws_module, "_drawn", watched)
    cache = square_cache(0)
    for unit in UNITS:
        faults = [with_rate(each, 0.5, unit=unit) for each in EVERY if unit != "number" or not hasattr(each, "block")]
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


def test_corrupt_strikes_each_row_with_its_own_lots_whatever_the_fault_says_of_when():
    cache = square_cache(3)
    fault = Zeros(scope=Scope(rate=0.5), at=7, transient=True)
    found = cache.fork(3).corrupt(fault)
    for row in range(3):
        assert same_bits(found.rows([row]), after(fault, cache, Draws(sample=row))[0])


@given(layers=st.integers(1, 90), data=st.data())
def test_bands_cut_all_layers_as_equally_as_they_come(layers: int, data: st.DataObject):
    cut = bands(layers, data.draw(st.integers(1, layers)))
    assert [layer for band in cut for layer in band] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_bands_of_28_layers_are_those_of_seed_001():
    assert bands(28, 4) == [range(0, 7), range(7, 14), range(14, 21), range(21, 28)]


@pytest.mark.parametrize(
    ("scope", "sentence"),
    [
        ({"rate": 1.5}, "rate=1.5; it must be 0 to 1"),
        ({"rate": -0.1}, "rate=-0.1; it must be 0 to 1"),
        ({"rate": float("nan")}, "rate=nan; it must be 0 to 1"),
        ({"rate": 0.5, "count": 2}, "count=2 and rate=0.5; give one of the two"),
        ({"count": -1}, "count=-1"),
        ({"layers": []}, "Scope has no layers"),
        ({"heads": []}, "Scope has no heads"),
        ({"slots": []}, "Scope has no slots"),
        ({"block": 0}, "block=0"),
        ({"block": 4, "unit": "number"}, "block=4 and unit='number'"),
        ({"parts": "x"}, "no parts called 'x'"),
        ({"among": "promt"}, "did you mean 'prompt'"),
        ({"unit": "slots"}, "did you mean 'slot'"),
    ],
    ids=str,
)
def test_a_scope_that_cannot_be_is_refused(unchecked: None, scope: dict[str, Any], sentence: str):
    with pytest.raises(UserError, match=sentence):
        Scope(**scope)


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
        with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
            after(Zeros(scope=Scope(**scope, unit=unit)), square_cache(0))


def test_segments_in_a_list_are_understood_as_layers_in_a_list_are(unchecked: None):
    cache, segments = square_cache(0), ["T1"]
    found, _ = after(Zeros(scope=Scope(segments=segments)), cache)  # pyright: ignore[reportArgumentType]
    assert same_bits(found, after(Zeros(scope=Scope(segments=("T1",))), cache)[0])


def test_a_scope_of_no_segments_is_refused_as_one_of_no_layers_is():
    with pytest.raises(UserError, match="Scope has no segments"):
        Scope(segments=())


@pytest.mark.parametrize("kind", [WrongPointers, OverlappingKV], ids=lambda kind: kind.__name__)
def test_paged_faults_strike_blocks_of_their_own_size(kind: Any):
    cache = square_cache(0)
    fault = kind(block=4, scope=Scope(rate=0.5))
    assert fault.scope.block == 4
    found, damage = after(fault, cache)
    assert int(damage.count[0]) in {2 * LAYERS * HEADS * slots for slots in (12, 10)}
    assert not same_bits(found, cache)


@pytest.mark.parametrize("name", ["seed", "sample", "repeat"])
def test_draws_below_0_are_refused(name: str):
    with pytest.raises(UserError, match=f"{name}=-1; it must be 0 or more"):
        Draws(**{name: -1})


def test_bit_flips_draw_single_numbers_by_default():
    cache = square_cache(0)
    found, _ = after(BitFlips(bit=31, scope=Scope(count=1, unit="number")), cache)
    changed = [int((a != b).sum()) for a, b in zip(found.keys + found.values, cache.keys + cache.values, strict=True)]
    assert changed == [1] * (2 * LAYERS)
    assert BitFlips().scope.unit == "number"
