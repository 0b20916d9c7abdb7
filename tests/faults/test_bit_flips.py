"""Flipped bits."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.faults import BitFlips, Draws, Scope
from kvprobe.faults.bit_flips import LAYOUTS, flipped
from tests.faults import LAYERS, after, square_cache
from tests.refusals import refused

INTEGERS = {"fp32": (torch.int32, np.uint32), "bf16": (torch.int16, np.uint16), "fp16": (torch.int16, np.uint16)}
WIDTH = {"fp32": 32, "bf16": 16, "fp16": 16}
FIELDS = {
    "fp32": {"mantissa": range(23), "exponent": range(23, 31), "sign": range(31, 32)},
    "bf16": {"mantissa": range(7), "exponent": range(7, 15), "sign": range(15, 16)},
    "fp16": {"mantissa": range(10), "exponent": range(10, 15), "sign": range(15, 16)},
}
"""IEEE 754 and bfloat16, from the lowest bit."""
EVERY_BIT = [(name, bit) for name, width in WIDTH.items() for bit in range(width)]


def from_bits(name: str, patterns: np.ndarray) -> torch.Tensor:
    """Floats with these bits."""
    return torch.from_numpy(patterns.view(patterns.dtype.str.replace("u", "i"))).view(LAYOUTS[name].dtype)


def to_bits(name: str, numbers: torch.Tensor) -> np.ndarray:
    """The bits of floats, as unsigned integers."""
    signed, unsigned = INTEGERS[name]
    return numbers.view(signed).numpy().view(unsigned)


def all_bits(name: str) -> np.ndarray:
    """Every pattern of 16 bits; of 32, those whose upper or lower half is any pattern, and the corners."""
    half = np.arange(2**16, dtype=np.uint32)
    if WIDTH[name] == 16:
        return half.astype(np.uint16)
    corners = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x007FFFFF], dtype=np.uint32)
    return np.concatenate([half << 16, half | 0x3F800000, half | 0x7F800000, corners, ~corners])


@pytest.mark.parametrize(("name", "bit"), EVERY_BIT)
def test_a_flip_is_the_xor_of_one_bit_for_every_pattern_and_a_second_flip_restores_it(name: str, bit: int):
    patterns = all_bits(name)
    bits = torch.full((len(patterns),), bit)
    once = flipped(from_bits(name, patterns), bits)
    assert once.dtype == LAYOUTS[name].dtype
    mask = patterns.dtype.type(1 << bit)
    assert np.array_equal(to_bits(name, once), patterns ^ mask)
    assert np.array_equal(to_bits(name, flipped(once, bits)), patterns)


@given(data=st.data(), name=st.sampled_from(list(WIDTH)))
def test_each_number_may_have_a_bit_of_its_own(data: st.DataObject, name: str):
    top = WIDTH[name]
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 2**top - 1), st.integers(0, top - 1)), min_size=1))
    patterns = np.array([pattern for pattern, _ in pairs], dtype=INTEGERS[name][1])
    bits = to_bits(name, flipped(from_bits(name, patterns), torch.tensor([bit for _, bit in pairs])))
    assert bits.tolist() == [pattern ^ 1 << bit for pattern, bit in pairs]


@pytest.mark.parametrize("name", list(WIDTH))
def test_fields_are_those_of_the_format(name: str):
    layout = LAYOUTS[name]
    assert layout.bits == WIDTH[name]
    for field, bits in FIELDS[name].items():
        assert layout.field(field) == bits
        assert {layout.field_of(bit) for bit in bits} == {field}


@pytest.mark.parametrize("name", list(WIDTH))
def test_a_flipped_sign_negates(name: str):
    cache = square_cache(0, dtype=LAYOUTS[name].dtype)
    every = Scope(unit="slot")
    for fault in (BitFlips(name, field="sign", scope=every), BitFlips(name, bit=WIDTH[name] - 1, scope=every)):
        damaged, _ = after(fault, cache)
        for now, before in zip(damaged.keys + damaged.values, cache.keys + cache.values, strict=True):
            assert torch.equal(now, -before)


@pytest.mark.parametrize("name", list(WIDTH))
@pytest.mark.parametrize("field", ["sign", "exponent", "mantissa", None])
def test_every_struck_number_has_exactly_one_bit_of_the_field_flipped_and_every_bit_comes_up(name: str, field: Any):
    cache = square_cache(1, slots=60, dtype=LAYOUTS[name].dtype)
    damaged, _damage = after(BitFlips(name, field=field, scope=Scope(unit="slot")), cache)
    seen: set[int] = set()
    different = []
    for now, before in zip(damaged.keys + damaged.values, cache.keys + cache.values, strict=True):
        flips = (to_bits(name, now) ^ to_bits(name, before)).flatten()
        assert (np.bitwise_count(flips) == 1).all()
        seen |= set(np.log2(flips.astype(np.float64)).astype(int).tolist())
        different.append(tuple(flips.tolist()))
    allowed = range(WIDTH[name]) if field is None else FIELDS[name][field]
    assert seen == set(allowed)
    if len(allowed) > 1:
        assert len(set(different)) == len(different), "layers, and K and V, draw bits of their own"


@pytest.mark.parametrize("unit", ["slot", "number"])
def test_only_struck_numbers_are_flipped_and_the_others_keep_their_bits(unit: Any):
    cache = square_cache(1)
    for name in WIDTH:
        stored = square_cache(1, dtype=LAYOUTS[name].dtype)
        damaged, _ = after(BitFlips(name, scope=Scope(rate=0.25, unit=unit)), stored, Draws(3))
        for now, before in zip(damaged.keys + damaged.values, stored.keys + stored.values, strict=True):
            ones = np.bitwise_count(to_bits(name, now) ^ to_bits(name, before))
            assert set(ones.flatten().tolist()) == {0, 1}
            share = float((ones > 0).mean())
            assert abs(share - 0.25) < 1 / cache.slots


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_finer_cache_is_rounded_to_the_dtype_first(name: str):
    cache = square_cache(1)
    damaged, _ = after(BitFlips(name, bit=3, scope=Scope(unit="slot")), cache)
    for now, before in zip(damaged.keys + damaged.values, cache.keys + cache.values, strict=True):
        stored = before.to(LAYOUTS[name].dtype)
        assert np.array_equal(to_bits(name, stored) ^ INTEGERS[name][1](8), to_bits(name, now.to(LAYOUTS[name].dtype)))
        assert torch.equal(now, now.to(LAYOUTS[name].dtype).float())


@pytest.mark.parametrize("stored", ["bf16", "fp16"])
def test_a_flip_in_a_coarser_cache_is_still_a_flip_or_is_refused(stored: str):
    """Models are bfloat16 on a GPU. A flip of a low bit of fp32 that bfloat16 rounds away would be a fault that never
    was."""
    cache = square_cache(1, dtype=LAYOUTS[stored].dtype)
    try:
        damaged, damage = after(BitFlips(scope=Scope(unit="slot")), cache)
    except ValueError:
        return
    changed = sum(
        int((a != b).sum()) for a, b in zip(damaged.keys + damaged.values, cache.keys + cache.values, strict=True)
    )
    assert changed == sum(layer.numel() for layer in cache.keys + cache.values), (
        f"{int(damage.count[0])} vectors struck"
    )


def test_a_flip_that_gives_nan_is_reported_with_its_place():
    cache = square_cache(1)
    cache.keys[1][0, 1, 5, 2] = 1.5
    fault = BitFlips(bit=30, scope=Scope(layers=[1], heads=[1], slots=[5], parts="k", unit="slot"))
    damaged, damage = after(fault, cache)
    assert bool(damaged.keys[1][0, 1, 5, 2].isnan())
    assert str(damage.nonfinite[0]) == "K of layer 1, KV head 1, slot 5"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "bf61"}, "There is no choice of dtype called 'bf61'; did you mean 'bf16'"),
        ({"dtype": "int8"}, "There is no choice of dtype called 'int8'"),
        ({"field": "expnent"}, "did you mean 'exponent'"),
        ({"bit": 32}, "give a bit from 0 to 31, or a field"),
        ({"dtype": "bf16", "bit": 16}, "give a bit from 0 to 15, or a field"),
        ({"bit": -1}, "give a bit from 0 to 31, or a field"),
        ({"bit": 3, "field": "sign"}, "bit=3 and field=sign; give a bit"),
    ],
    ids=str,
)
def test_a_bit_or_field_that_does_not_exist_is_refused(unchecked: None, settings: dict[str, Any], sentence: str):
    refused(lambda: BitFlips(**settings), sentence)


def test_bit_flips_draw_single_numbers_by_default():
    cache = square_cache(0)
    damaged, _ = after(BitFlips(bit=31, scope=Scope(count=1, unit="number")), cache)
    changed = [
        int((a != b).sum()) for a, b in zip(damaged.keys + damaged.values, cache.keys + cache.values, strict=True)
    ]
    assert changed == [1] * (2 * LAYERS)
    assert BitFlips().scope.unit == "number"
