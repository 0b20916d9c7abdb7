"""Scenes of random numbers, for tests of policies that need no model."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import new_slots
from kvprobe.policies import Attention, Scene
from kvprobe.text.tokens import Tokens
from tests.random_caches import random_cache

QUERIES = 5
"""Queries that a random record remembers one by one."""


def random_scene(
    seed: int, batch: int = 2, slots: int = 9, *, ragged: bool = False, padded: bool = False, gaps: bool = False
) -> Scene:
    """A cache of noise with a record of attention in whole numbers, so that ties are common and means exact."""
    rng = torch.Generator().manual_seed(seed)
    cache = random_cache(seed, batch, slots, padded=padded, gaps=gaps)
    shape = (cache.n_layers, batch, cache.n_kv_heads)
    if ragged:
        live = cache.ledger.live & (torch.rand(*shape, slots, generator=rng) < 0.7)
        cache = replace(cache, ledger=replace(cache.ledger, live=live))
    seen = (~cache.ledger.padding)[None, :, None, :]
    total = torch.randint(0, 6, (*shape, slots), generator=rng) * 2.0 * seen
    recent = torch.randint(0, 4, (*shape, QUERIES, slots), generator=rng) * 2.0 * seen[..., None, :]
    return Scene(cache, Attention(total, recent))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """Scenes of one to three rows; padded, ragged by layer and head, and with gaps between positions, or not."""
    return random_scene(
        seed=draw(st.integers(0, 2**31)),
        batch=draw(st.integers(1, 3)),
        slots=draw(st.integers(1, 12)),
        ragged=draw(st.booleans()),
        padded=draw(st.booleans()),
        gaps=draw(st.booleans()),
    )


def with_token(cache: KVCache, token: int) -> KVCache:
    """The cache with one more token in each row, where the row goes on; its keys and values are its id."""
    runs = [Tokens.of([token], "new", start) for start in cache.ledger.following.tolist()]

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((*tensor.shape[:2], 1, tensor.shape[3]), token)], 2)

    ledger = cache.ledger.append(new_slots(runs, torch.device("cpu")))
    return KVCache.of(tuple(map(longer, cache.keys)), tuple(map(longer, cache.values)), ledger)


def empty_cache(rows: int) -> KVCache:
    """A cache of one layer, head and number that has read nothing."""
    return random_cache(0, rows, 1, n_layers=1, kv_heads=1, d_head=1).evict("system")
