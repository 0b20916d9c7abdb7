"""Fault contexts of random numbers, a registry with one fault of each kind, and helpers that strike."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.rotary import Rotary
from kvprobe.faults import (
    BitFlips,
    ChannelOrder,
    Damage,
    Distractor,
    Draws,
    Fault,
    FaultContext,
    ForeignBlock,
    ForeignScales,
    Fp8Saturation,
    Fp8Scale,
    Gaussian,
    Misread,
    NotANumber,
    OverlappingKV,
    Permuted,
    PositionShift,
    QuantisationNoise,
    Queries,
    Scaled,
    Scope,
    Splice,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.faults.strike import strike
from kvprobe.inference.model import Model
from tests.random_caches import random_cache, random_tokens

FIRST = Draws()
PARTS = ("k", "v")
UNITS = ("slot", "layer", "head", "number")
SEEDS = st.integers(0, 2**31)
LAYERS, HEADS, WIDTH, SLOTS = 3, 2, 8, 22
GROUP, TOKENS = 2, 3
"""Query heads to a KV head, and tokens whose queries a context knows."""

NO_MODEL: list[Fault] = [
    Zeros(),
    NotANumber(),
    Permuted(),
    *(Gaussian(matched=how) for how in ("raw", "layer", "head", "channel")),
    *(WrongPointers(pointing=how, block=4) for how in ("swapped", "repeated")),
    OverlappingKV(block=4),
    Misread(block=4),
    ChannelOrder(),
    Scaled(factor=3.0),
    ForeignScales(),
    Fp8Scale(factor=2.0),
    Fp8Saturation(room=0.5, kind="e5m2"),
    QuantisationNoise(bits=3, group=4),
    BitFlips(bit=13),
    BitFlips(field="mantissa"),
]
DONATED: list[Fault] = [
    Distractor(),
    Distractor(matched=True),
    ForeignBlock(block=4),
    StaleBlock(block=4),
    Splice(above=1),
]
EVERY: list[Fault] = [*NO_MODEL, *DONATED, Gaussian(matched="effect"), PositionShift(by=3)]
"""The registry: one fault of each kind, at rate 1, and of each way to match noise or to point."""


def square_cache(seed: int, slots: int = SLOTS, dtype: torch.dtype = torch.float32, **settings: Any) -> KVCache:
    """A random cache whose values are as wide as its keys."""
    shape = {"batch": 1, "n_layers": LAYERS, "kv_heads": HEADS, "d_head": WIDTH} | settings
    cache = random_cache(seed, slots=slots, dtype=dtype, **shape)
    return cache.with_parts({"V": tuple(value[..., :-1].contiguous() for value in cache.values)})


def context_of(cache: KVCache, donor_slots: int | None = None) -> FaultContext:
    """A context with everything that any fault may need, in random numbers."""
    layers, (_, heads, width) = cache.n_layers, cache.shape[0][0]
    settings = {"dtype": cache.keys[0].dtype, "n_layers": layers, "kv_heads": heads, "d_head": width}
    donors = {
        name: square_cache(seed, cache.slots if donor_slots is None else donor_slots, **settings)
        for seed, name in ((101, "distractor"), (102, "scaffold"))
    }
    rotary = Rotary(10000.0 ** -(torch.arange(width // 2) / (width // 2)))
    rng = torch.Generator().manual_seed(7)
    asked = tuple(torch.randn(heads, TOKENS * GROUP, width, generator=rng) for _ in range(layers))
    return FaultContext(cache, donors, (rotary,) * layers, Queries(asked, (width**-0.5,) * layers, GROUP))


def after(
    faults: Fault | Sequence[Fault],
    cache: KVCache,
    draws: Draws | Sequence[Draws] = FIRST,
    context: FaultContext | None = None,
    step: int = 0,
) -> tuple[KVCache, Damage]:
    """The cache of one row with a fault struck into a copy of it; or of several faults, each with a row of its own."""
    faults = [faults] if isinstance(faults, Fault) else list(faults)
    draws = [draws] * len(faults) if isinstance(draws, Draws) else list(draws)
    forked = cache.fork(len(faults))
    layers = [{name: part.clone().contiguous() for name, part in layer.items()} for layer in forked.layers]
    context = context or context_of(cache)
    damage = strike(faults, draws, range(len(faults)), layers, forked.ledger, context, step)
    return KVCache(tuple(layers), forked.ledger), damage


def struck_by(scope: Scope, cache: KVCache, draws: Draws = FIRST, step: int = 0) -> tuple[Tensor, Tensor]:
    """Which numbers of K and of V a scope strikes: `[layers, heads, slots, d]` each."""
    zeroed, _ = after(Zeros(scope=scope), cache, draws, step=step)
    return torch.stack([layer[0] == 0 for layer in zeroed.keys]), torch.stack(
        [layer[0] == 0 for layer in zeroed.values]
    )


def with_rate(fault: Fault, rate: float, **scope: Any) -> Fault:
    """The same fault at another rate."""
    return replace(fault, scope=replace(fault.scope, rate=rate, **scope))


def same_bits(one: KVCache, other: KVCache) -> bool:
    """Whether K and V are the same bit for bit, NaN included."""
    view = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
    return all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(view[a.dtype]), b.contiguous().view(view[b.dtype]))
        for a, b in zip(one.keys + one.values, other.keys + other.values, strict=True)
    )


def both(cache: KVCache) -> list[tuple[str, int, Tensor]]:
    """Part, layer and `[heads, slots, d]` of a cache of one row."""
    pairs = zip(cache.keys, cache.values, strict=True)
    return [
        (part, layer, tensor[0]) for layer, pair in enumerate(pairs) for part, tensor in zip(PARTS, pair, strict=True)
    ]


def outlying(slots: int, dtype: torch.dtype = torch.float32) -> KVCache:
    """A cache in which every layer, head and channel has a mean and a deviation of its own, and channels vary
    together."""
    cache = square_cache(0, slots, dtype=torch.float32)
    rng = torch.Generator().manual_seed(1)

    def shaped(tensor: Tensor) -> Tensor:
        mixing = torch.randn(HEADS, WIDTH, WIDTH, generator=rng)
        return (tensor @ mixing + 5 * torch.randn(1, HEADS, 1, WIDTH, generator=rng)).to(dtype)

    return KVCache.of(tuple(map(shaped, cache.keys)), tuple(map(shaped, cache.values)), cache.ledger)


def reindexed(model: Model) -> KVCache:
    """A cache with a segment evicted and its positions closed up."""
    tokens = random_tokens(3, {"system": 4, "T1": 6, "T2": 8})
    return model.prefill(tokens).evict("T1").reindex("contiguous")
