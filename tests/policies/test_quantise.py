"""Quantised caches: how far numbers move, which slots and when, and what the bytes come to."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimum import quanto
from optimum.quanto.tensor import ungroup

from kvprobe.cache.cache import KVCache
from kvprobe.cache.footprint import footprint
from kvprobe.cache.ledger import QuantisationFormat
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.policies import Quantise, Scene, SlidingWindow
from kvprobe.policies.codes import Codes, codes_of_keys, codes_of_values
from tests.policies.scenes import with_token
from tests.random_caches import assert_bit_identical, copy_of, random_cache, random_tokens
from tests.refusals import refused

seeds = st.integers(0, 2**31)
bits_drawn = st.integers(1, 8)
few = settings(max_examples=25)


@st.composite
def caches(draw: st.DrawFn, bits: int | None = None) -> tuple[KVCache, Quantise]:
    """Caches of rows of any length, and how to quantise them; values have five numbers, in groups of five or one."""
    cache = random_cache(
        draw(seeds),
        batch=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 24)),
        n_layers=2,
        padded=draw(st.booleans()),
        some_masked=draw(st.booleans()),
    )
    size = draw(st.sampled_from([1e-3, 1.0, 300.0]))
    scaled = KVCache.of(
        tuple(keys * size for keys in cache.keys), tuple(values * size for values in cache.values), cache.ledger
    )
    group, tail = draw(st.sampled_from([1, 5, 7])), draw(st.integers(0, 9))
    return scaled, Quantise(draw(bits_drawn) if bits is None else bits, group=group, tail=tail)


def quantise(cache: KVCache, policy: Quantise) -> KVCache:
    return policy.act(Scene(cache)).cache


def groups_of(cache: KVCache, row: int) -> list[list[int]]:
    """The slots of each group that a row holds, by the ledger."""
    numbers = cache.ledger.quantised[row].tolist()
    return [[slot for slot, number in enumerate(numbers) if number == group] for group in sorted(set(numbers) - {-1})]


def halves_below(number: float) -> list[np.float32]:
    """The two largest numbers of float16 that are not above this one."""
    half = np.float16(number)
    first = half if half <= number else np.nextafter(half, np.float16(-np.inf))
    return [np.float32(first), np.float32(np.nextafter(first, np.float16(-np.inf)))]


def grids(numbers: np.ndarray, bits: int) -> list[tuple[np.ndarray, float]]:
    """A group on each grid of float16 that spans it closely: the numbers, rounded to it, and its step."""
    candidates = []
    for low in halves_below(numbers.min()):
        for step in [-half for half in halves_below(-(numbers.max() - low) / np.float32(2**bits - 1))]:
            codes = np.clip(np.rint((numbers - low) / max(step, np.float32(2.0**-24))), 0, 2**bits - 1)
            candidates.append(((codes * step + low).astype(np.float32), float(step)))
    return candidates


def groups_of_numbers(cache: KVCache, row: int, slots: list[int], group: int) -> list[tuple[str, tuple]]:
    """Where the numbers lie that share a scale, in one group of slots: a key's channel, so many of a value's
    channels."""
    places: list[tuple[str, tuple]] = []
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            for channel in range(cache.keys[0].shape[3]):
                places.append(("keys", (layer, row, head, slots, channel)))
            width = min(group, cache.values[0].shape[3])
            for slot in slots:
                for first in range(0, cache.values[0].shape[3], width):
                    places.append(("values", (layer, row, head, slot, slice(first, first + width))))
    return places


def numbers_at(cache: KVCache, kind: str, where: tuple) -> np.ndarray:
    layer, *rest = where
    return getattr(cache, kind)[layer][tuple(rest)].numpy()


@given(drawn=caches())
@few
def test_each_group_is_rounded_as_a_loop_in_numpy_rounds_it(drawn: tuple[KVCache, Quantise]):
    cache, policy = drawn
    after = quantise(cache, policy)
    for row in range(cache.batch):
        for slots in groups_of(after, row):
            for kind, where in groups_of_numbers(cache, row, slots, policy.group):
                before, rounded = numbers_at(cache, kind, where), numbers_at(after, kind, where)
                largest = np.abs(before).max()
                near = [grid for grid in grids(before, policy.bits) if np.allclose(rounded, grid[0], 0, 1e-6 * largest)]
                assert near
                assert np.abs(rounded - before).max() <= max(step for _, step in near) / 2 + 1e-6 * largest


@given(
    seed=seeds, bits=bits_drawn, size=st.sampled_from([1e-6, 1e-2, 1.0, 5e3]), offset=st.sampled_from([0.0, 1.0, -7.0])
)
@settings(max_examples=60)
def test_no_number_moves_by_more_than_half_its_groups_step(seed: int, bits: int, size: float, offset: float):
    numbers = (torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) + offset) * size
    for codes in (
        codes_of_keys(numbers, QuantisationFormat(bits, 4)),
        codes_of_values(numbers, QuantisationFormat(bits, 5)),
    ):
        error = (codes.numbers() - numbers).abs()
        step = codes.scale.expand_as(codes.codes).flatten(3)
        assert bool((error <= step / 2 + 1e-6 * numbers.abs().max()).all())
        assert int(codes.codes.max()) <= 2**bits - 1
        for stored in (codes.scale, codes.minimum):
            assert torch.equal(stored.half().float(), stored)


@given(seed=seeds, bits=bits_drawn)
@few
def test_a_finer_grain_is_never_further_off_at_worst(seed: int, bits: int):
    numbers = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    steps = [codes_of_keys(numbers, QuantisationFormat(width, 4)).scale for width in (bits, min(8, bits + 1))]
    assert bool((steps[1] <= steps[0]).all())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("number", [0.0, 0.5, -3.0])
def test_a_constant_group_that_float16_can_hold_stays_as_it_is(bits: int, number: float):
    numbers = torch.full((1, 2, 3, 4), number)
    codes = codes_of_keys(numbers, QuantisationFormat(bits, 3))
    assert torch.equal(codes.numbers(), numbers)
    assert not bool(codes.codes.any())
    assert not bool(codes.scale.any())


@given(number=st.floats(-6e4, 6e4, width=32), bits=bits_drawn)
@settings(max_examples=60)
def test_a_constant_group_moves_by_no_more_than_a_step_of_float16(number: float, bits: int):
    codes = codes_of_keys(torch.full((1, 1, 3, 2), number), QuantisationFormat(bits, 3))
    restored = codes.numbers()
    assert float((restored - number).abs().max()) <= max(abs(number) * 2.0**-10, 2.0**-24)
    assert len(restored.unique()) == 1


def test_a_single_bit_separates_two_numbers():
    numbers = torch.tensor([0.25, -1.5, 0.25])[None, None, :, None]
    assert torch.equal(codes_of_keys(numbers, QuantisationFormat(1, 3)).numbers(), numbers)


@pytest.mark.parametrize("number", [1e6, -7e4, float("inf")])
def test_numbers_that_float16_cannot_reach_are_refused(number: float):
    cache = random_cache(0, batch=1)
    cache.keys[1][0, 0, 0, 0] = number
    refused(lambda: quantise(cache, Quantise(4, group=5, tail=0)), "beyond 65,504")


def test_values_are_grouped_by_channels_and_keys_by_slots():
    keys, values = torch.zeros(1, 1, 4, 6), torch.zeros(1, 1, 4, 6)
    keys[..., 2, 3] = values[..., 2, 3] = 1.0
    assert codes_of_keys(keys, QuantisationFormat(2, 4)).scale[0, 0].nonzero().tolist() == [[0, 3]]
    # Slot 2, of its two groups of three channels the second.
    assert codes_of_values(values, QuantisationFormat(2, 3)).scale[0, 0].nonzero().tolist() == [[2, 1, 0]]


def test_a_group_wider_than_a_value_is_the_whole_value():
    assert codes_of_values(torch.ones(1, 1, 32, 6), QuantisationFormat(2, 32)).scale.shape == (1, 1, 32, 1, 1)


@given(drawn=caches())
@few
def test_whole_groups_of_the_oldest_slots_are_quantised_and_the_tail_is_not(drawn: tuple[KVCache, Quantise]):
    cache, policy = drawn
    after = quantise(cache, policy)
    for row in range(cache.batch):
        live = torch.nonzero(cache.ledger.live_somewhere[row])[:, 0].tolist()
        whole = max(0, len(live) - policy.tail) // policy.group
        expected = [live[first * policy.group : (first + 1) * policy.group] for first in range(whole)]
        assert groups_of(after, row) == expected
        fine = [slot for slot in range(cache.slots) if slot not in live[: whole * policy.group]]
        for rounded, tensor in zip(after.keys + after.values, cache.keys + cache.values, strict=True):
            assert torch.equal(rounded[row][:, fine], tensor[row][:, fine])
        left = len(live) - whole * policy.group
        assert left <= policy.tail + policy.group - 1
        assert left >= min(policy.tail, len(live))
    assert after.ledger.quantisation == QuantisationFormat(policy.bits, policy.group)


@given(seed=seeds, bits=bits_drawn, group=st.sampled_from([1, 5]), tail=st.integers(0, 4), new=st.integers(1, 12))
@few
def test_slots_are_quantised_once_and_numbered_apart(seed: int, bits: int, group: int, tail: int, new: int):
    policy = Quantise(bits, group=group, tail=tail)
    cache = quantise(random_cache(seed, batch=2, slots=8, padded=True), policy)
    for token in range(new):
        longer = with_token(cache, token)
        again = quantise(longer, policy)
        for row in range(2):
            done = cache.ledger.quantised[row] >= 0
            assert torch.equal(again.ledger.quantised[row, : cache.slots][done], cache.ledger.quantised[row][done])
            for rounded, tensor in zip(again.keys + again.values, cache.keys + cache.values, strict=True):
                assert torch.equal(rounded[row][:, : cache.slots][:, done], tensor[row][:, done])
            assert all(len(slots) == group for slots in groups_of(again, row))
        cache = again


def test_acting_again_at_once_changes_nothing():
    cache = quantise(random_cache(0, slots=12), Quantise(3, group=5, tail=1))
    assert_bit_identical(quantise(cache, Quantise(3, group=5, tail=1)), cache)


def test_a_row_is_quantised_as_it_would_be_alone():
    cache = random_cache(3, batch=3, slots=14, padded=True, some_masked=True)
    policy = Quantise(2, group=5, tail=1)
    together = quantise(cache, policy)
    for row in range(3):
        assert_bit_identical(together.rows([row]), quantise(cache.rows([row]), policy))


@pytest.mark.parametrize("rows", [1, 3])
def test_quantising_a_fork_leaves_the_original_as_it_was(rows: int):
    cache = random_cache(0, batch=1, slots=12)
    before = copy_of(cache)
    fork = cache.fork(rows)
    after = quantise(fork, Quantise(2, group=5, tail=1))
    assert not torch.equal(after.keys[0], fork.keys[0])
    assert_bit_identical(cache, before)
    assert_bit_identical(fork, before.fork(rows))
    for row in range(rows):
        assert_bit_identical(after.rows([row]), quantise(before, Quantise(2, group=5, tail=1)))


def packed(codes: Codes, bits: int) -> bytes:
    """The bytes that an engine stores: each slot's codes without gaps, then scales and minima in float16."""
    vectors = codes.codes.flatten(3).numpy()
    planes = np.unpackbits(vectors[..., None], axis=-1)[..., 8 - bits :]
    without_gaps = np.packbits(planes.reshape(*vectors.shape[:3], -1), axis=-1)
    return b"".join([without_gaps.tobytes(), *(part.half().numpy().tobytes() for part in (codes.scale, codes.minimum))])


def packed_bytes(before: KVCache, after: KVCache, policy: Quantise) -> int:
    """Bytes of what an engine would hold: every group packed, and all other live slots as they are."""
    held = b""
    quantisation = QuantisationFormat(policy.bits, policy.group)
    for row in range(after.batch):
        groups = groups_of(after, row)
        fine = [slot for slot, number in enumerate(after.ledger.quantised[row].tolist()) if number < 0]
        fine = [slot for slot in fine if bool(after.ledger.live_somewhere[row, slot])]
        for keys, values in zip(before.keys, before.values, strict=True):
            if groups:
                where = torch.tensor(groups)
                held += packed(codes_of_keys(keys[row][:, where], quantisation), policy.bits)
                held += packed(codes_of_values(values[row][:, where], quantisation), policy.bits)
            held += keys[row][:, fine].numpy().tobytes() + values[row][:, fine].numpy().tobytes()
    return len(held)


@given(drawn=caches())
@settings(max_examples=40)
def test_the_footprint_is_that_of_the_packed_bytes_and_the_tail(drawn: tuple[KVCache, Quantise]):
    cache, policy = drawn
    after = quantise(cache, policy)
    assert after.footprint == packed_bytes(cache, after, policy)


@given(seed=seeds, bits=bits_drawn)
@few
def test_packed_bytes_unpack_to_the_codes_scales_and_minima(seed: int, bits: int):
    numbers = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(seed))
    codes = codes_of_values(numbers, QuantisationFormat(bits, 5))
    stored = np.frombuffer(packed(codes, bits), np.uint8)
    width = -(-5 * bits // 8)
    vectors, tail = stored[: 2 * 3 * 4 * width].reshape(2, 3, 4, width), stored[2 * 3 * 4 * width :]
    planes = np.unpackbits(vectors, axis=-1)[..., : 5 * bits].reshape(2, 3, 4, 5, bits)
    unpacked = (planes * 2 ** np.arange(bits - 1, -1, -1)).sum(-1)
    assert np.array_equal(unpacked, codes.codes.flatten(3).numpy())
    halves = tail.view(np.float16).astype(np.float32)
    scale, minimum = (torch.from_numpy(half).view(2, 3, 4, 1, 1) for half in np.split(halves, 2))
    assert torch.equal(Codes(codes.codes, scale, minimum).numbers(), codes.numbers())


def test_a_group_that_is_partly_evicted_still_holds_its_scales():
    cache = random_cache(0, batch=1, slots=10, n_layers=1, kv_heads=1)
    after = quantise(cache, Quantise(4, group=5, tail=0))
    whole = after.footprint
    slot = 2 + 3 + 4  # codes of four and five numbers of four bits, a scale and a minimum for the value
    assert whole == 10 * slot + 2 * 4 * 4
    assert after.evict(slots=torch.arange(10)[None] == 3).footprint == whole - slot
    assert after.evict(slots=torch.arange(10)[None] < 5).footprint == whole - 5 * slot - 4 * 4


def test_a_cache_that_is_not_quantised_costs_what_its_live_heads_store():
    cache = random_cache(1, batch=2, slots=8, n_layers=3, kv_heads=2)
    assert cache.footprint == cache.nbytes == 3 * 2 * 2 * 8 * 9 * 4
    masked = cache.mask(slots=torch.ones(2, 8, dtype=torch.bool), layers=[0], heads=[1])
    assert masked.footprint == cache.nbytes * 5 // 6
    assert masked.nbytes == cache.nbytes
    assert footprint(cache.ledger, cache.shape, 2) == cache.nbytes // 2


def test_generation_goes_on_in_the_same_grain_and_its_footprint_falls(tiny_llama: Model):
    prompt = [random_tokens(0, {"T1": 20})]
    generation = generate(tiny_llama.lanes, prompt, max_new_tokens=14, stop=(), policy=Quantise(4, group=8, tail=4))
    tails = [int((kept.ledger.quantised < 0).sum()) for kept in generation.trace]
    assert tails == [4, 5, 6, 7, 8, 9, 10, 11, 4, 5, 6, 7, 8, 9]
    plain = generate(tiny_llama.lanes, prompt, max_new_tokens=14, stop=())
    assert generation.cache.footprint < plain.cache.footprint / 2
    assert generation.cache.nbytes == plain.cache.nbytes


def test_quantised_slots_may_be_evicted_and_later_groups_take_no_number_that_is_held(tiny_llama: Model):
    policy = Quantise(4, group=4, tail=2) | SlidingWindow(12)
    generation = generate(tiny_llama.lanes, [random_tokens(0, {"T1": 20})], max_new_tokens=20, stop=(), policy=policy)
    for kept in generation.trace:
        numbers = kept.ledger.quantised[0]
        counts = numbers[numbers >= 0].unique(return_counts=True)[1]
        assert int(counts.max()) <= 4
        assert kept.footprint < kept.nbytes


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_grid_is_that_of_quanto(bits: int, kind: str):
    """Optimum-quanto is what transformers quantises its caches with: keys along slots, values along channels."""
    kv_heads, slots, width, group = 2, 24, 16, 8
    qtype, axis = {2: quanto.qint2, 4: quanto.qint4}[bits], {"keys": -1, "values": 0}[kind]
    numbers = torch.randn(kv_heads, slots, width, generator=torch.Generator().manual_seed(bits))

    def theirs(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift = quanto.MaxOptimizer()(tensor, qtype, axis, group)
        # What `quantize_weight` stores, before it is packed for a compiled kernel.
        codes = torch.ops.quanto.quantize_affine(tensor, bits, axis, group, scale, shift)
        return ungroup(codes * scale - shift, axis, tensor.shape), ungroup(scale.expand_as(codes), axis, tensor.shape)

    def ours(tensor: torch.Tensor) -> torch.Tensor:
        grouped = tensor.unflatten(1, (-1, group))
        codes_of = codes_of_keys if kind == "keys" else codes_of_values
        return codes_of(grouped, QuantisationFormat(bits, group)).numbers().flatten(1, 2)

    actual, (expected, step) = ours(numbers), theirs(numbers)
    # Their scale and minimum have fp32 and ours float16: numbers near the middle between two codes may part.
    assert bool(((actual - expected).abs() <= 0.01 * step + 4e-3).float().mean() > 0.98)
    assert bool(((actual - expected).abs() <= 1.02 * step + 4e-3).all())
    # Where float16 holds the ends of every group, and its step, nothing parts.
    exact = numbers.clamp(-1.875, 1.875)
    ends = exact.unflatten(1, (-1, group)) if kind == "keys" else exact.unflatten(2, (-1, group))
    (ends[:, :, 0] if kind == "keys" else ends[..., 0]).fill_(-1.875)
    (ends[:, :, 1] if kind == "keys" else ends[..., 1]).fill_(1.875)
    torch.testing.assert_close(ours(exact), theirs(exact)[0], rtol=0, atol=1e-6)
