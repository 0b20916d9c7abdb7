"""Ledgers, caches and tokens of random numbers, for tests that need no model."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import COLUMNS, PADDING, Ledger
from kvprobe.text.tokens import Tokens

NAMES = ("system", "T1", "summary", "T2")


def random_ledger(
    seed: int,
    batch: int = 2,
    slots: int = 8,
    layers: int = 1,
    kv_heads: int = 1,
    *,
    gaps: bool = False,
    padded: bool = False,
    some_masked: bool = False,
) -> Ledger:
    """A ledger with `NAMES` as segments, in order; all live and contiguous unless asked otherwise."""
    rng = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 6, (batch, slots), generator=rng) if gaps else torch.ones(batch, slots).long()
    segments = (torch.arange(slots) * len(NAMES) // max(slots, 1)).repeat(batch, 1)
    if padded:
        lengths = torch.randint(1, slots + 1, (batch, 1), generator=rng)
        segments = segments.masked_fill(torch.arange(slots) >= lengths, PADDING)
    live = torch.ones(layers, batch, kv_heads, slots, dtype=torch.bool)
    if some_masked:
        live = torch.rand(live.shape, generator=rng) < 0.6
    positions = steps.cumsum(1) - steps[:, :1]
    return Ledger(
        tokens=torch.randint(0, 64, (batch, slots), generator=rng),
        positions=positions,
        origins=positions,
        segments=segments,
        recomputed=torch.rand(batch, slots, generator=rng) < 0.5,
        delimiters=torch.rand(batch, slots, generator=rng) < 0.3,
        quantised=torch.full_like(positions, -1),
        makers=torch.full_like(positions, -1),
        edited=torch.rand(batch, slots, generator=rng) < 0.2,
        dropped=torch.zeros_like(segments, dtype=torch.bool),
        live=live & (segments != PADDING)[None, :, None, :],
        following=positions.masked_fill(segments == PADDING, -1).amax(1) + 1,
        names=NAMES,
    )


def random_cache(
    seed: int,
    batch: int = 2,
    slots: int = 8,
    n_layers: int = 3,
    kv_heads: int = 2,
    d_head: int = 4,
    dtype: torch.dtype = torch.float32,
    **ledger: Any,
) -> KVCache:
    """A cache of normal noise over a `random_ledger`; the values are wider than the keys."""
    rng = torch.Generator().manual_seed(seed)

    def noise(width: int) -> torch.Tensor:
        return torch.randn(batch, kv_heads, slots, width, generator=rng).to(dtype)

    return KVCache.of(
        keys=tuple(noise(d_head) for _ in range(n_layers)),
        values=tuple(noise(d_head + 1) for _ in range(n_layers)),
        ledger=random_ledger(seed, batch, slots, **ledger),
    )


@st.composite
def ledgers(draw: st.DrawFn, min_slots: int = 1) -> Ledger:
    """Ledgers of one to three rows with gaps, padding and slots that are not live, per layer and head or not."""
    return random_ledger(
        seed=draw(st.integers(0, 2**31)),
        batch=draw(st.integers(1, 3)),
        slots=draw(st.integers(min_slots, 9)),
        layers=draw(st.sampled_from([1, 3])),
        kv_heads=draw(st.sampled_from([1, 2])),
        gaps=draw(st.booleans()),
        padded=draw(st.booleans()),
        some_masked=draw(st.booleans()),
    )


def copy_of(cache: KVCache) -> KVCache:
    """The same cache in storage of its own."""
    columns = (*COLUMNS, "live", "following")
    ledger = replace(cache.ledger, **{name: getattr(cache.ledger, name).clone() for name in columns})
    layers = ({name: part.clone() for name, part in layer.items()} for layer in cache.layers)
    return KVCache(tuple(layers), ledger)


def assert_same_ledger(actual: Ledger, expected: Ledger) -> None:
    for name in (*COLUMNS, "live", "following"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert (actual.names, actual.quantisation) == (expected.names, expected.quantisation)


def assert_bit_identical(actual: KVCache, expected: KVCache) -> None:
    for layer, pairs in enumerate(zip(actual.keys + actual.values, expected.keys + expected.values, strict=True)):
        assert pairs[0].dtype == pairs[1].dtype
        assert torch.equal(*pairs), f"tensor {layer} differs"
    assert_same_ledger(actual.ledger, expected.ledger)


def random_tokens(seed: int, segments: dict[str, int], start: int = 0) -> Tokens:
    """Random ids in these segments of these lengths, at consecutive positions from `start`."""
    rng = torch.Generator().manual_seed(seed)
    tokens = Tokens.of([])
    for name, count in segments.items():
        ids = torch.randint(0, 64, (count,), generator=rng).tolist()
        tokens += Tokens.of(ids, name, start + len(tokens))
    return tokens


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected number."""
    return float((actual - expected).abs().max() / expected.abs().max())


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert relative_difference(actual, expected) < tolerance


def ragged_mask(cache: KVCache, seed: int) -> KVCache:
    """Random slots masked, others in each layer and head."""
    rng = torch.Generator().manual_seed(seed)
    for layer in range(cache.n_layers):
        for head in range(cache.n_kv_heads):
            slots = torch.rand(cache.batch, cache.slots, generator=rng) < 0.4
            cache = cache.mask(slots=slots, layers=[layer], heads=[head])
    return cache


def assert_close_caches(actual: KVCache, expected: KVCache, tolerance: float = 1e-5) -> None:
    assert_same_ledger(actual.ledger, expected.ledger)
    for pair in zip(actual.keys + actual.values, expected.keys + expected.values, strict=True):
        assert relative_difference(*pair) < tolerance
