"""The light cone on real weights (science.md C3): where a hidden code cannot reach, nothing may vary with it.

With one masked turn between, T3 can only learn of T2 through summary 2. Summary 2's K and V at layer 0 are made
before any attention, so they cannot carry the code; those at layer 1 can. T3 therefore first differs in the
residual stream after layer 1, and in K and V at layer 2.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import extend
from kvprobe.inference.model import Model
from kvprobe.tasks.passcode import contexts, conversation
from kvprobe.text.tokens import Tokens

CODES = ("48213", "90577", "13662")
ROUND_OFF = 1e-5


def span_of(cache: KVCache, segment: str, layer: int) -> tuple[Tensor, Tensor]:
    slots = cache.ledger.in_segments([segment])[0]
    return cache.keys[layer][0, :, slots], cache.values[layer][0, :, slots]


def variation(caches: Sequence[KVCache], segment: str, layer: int) -> float:
    """Largest difference between codes in K or V of a segment, relative to their size."""
    largest = 0.0
    for tensors in zip(*(span_of(cache, segment, layer) for cache in caches), strict=True):
        stacked = torch.stack(tensors)
        largest = max(largest, float((stacked - stacked[0]).abs().max() / stacked.abs().max()))
    return largest


def whole(smol: Model, code: str) -> tuple[Tokens, Tokens]:
    """The tokens before T3, and those of T3 before it gives the code."""
    tokens = conversation(contexts()[3], code).tokens(smol.tokenizer)
    start = tokens.span("T3").start
    return tokens[:start], tokens[start : tokens.part("answer").start]


@pytest.fixture(scope="module")
def direct(smol: Model) -> list[KVCache]:
    return [smol.prefill(whole(smol, code)[0]) for code in CODES]


@pytest.fixture(scope="module")
def masked(smol: Model, direct: list[KVCache]) -> list[KVCache]:
    return [
        extend(smol.lanes, cache.mask("T1", "T2"), [whole(smol, code)[1]])[0]
        for cache, code in zip(direct, CODES, strict=True)
    ]


@pytest.fixture(scope="module")
def restart(smol: Model) -> list[KVCache]:
    caches = []
    for code in CODES:
        tokens = conversation(contexts()[3], code).without("T1", "T2").tokens(smol.tokenizer)
        caches.append(smol.prefill(tokens[: tokens.part("answer").start]))
    return caches


def test_direct_slots_cannot_know_the_code_at_layer_0_and_do_from_layer_1(direct: list[KVCache]):
    assert variation(direct, "summary2", 0) <= ROUND_OFF
    assert min(variation(direct, "summary2", layer) for layer in range(1, 30)) > 100 * ROUND_OFF


def test_masked_slots_cannot_know_the_code_at_layers_0_and_1_and_do_above(masked: list[KVCache]):
    assert variation(masked, "T3", 0) <= ROUND_OFF
    assert variation(masked, "T3", 1) <= ROUND_OFF
    assert min(variation(masked, "T3", layer) for layer in range(2, 30)) > 10 * ROUND_OFF


def test_restarted_slots_cannot_know_the_code_at_any_layer(restart: list[KVCache]):
    for segment in ("summary1", "summary2", "T3"):
        assert max(variation(restart, segment, layer) for layer in range(30)) <= ROUND_OFF


def test_slots_before_the_code_cannot_know_it(masked: list[KVCache]):
    for segment in ("system", "T1", "summary1"):
        assert max(variation(masked, segment, layer) for layer in range(30)) <= ROUND_OFF


def test_restart_differs_from_masked_in_provenance_alone(masked: list[KVCache], restart: list[KVCache]):
    kept = masked[0].evict("T1", "T2").ledger
    fresh = restart[0].ledger
    assert kept.tokens.equal(fresh.tokens)
    assert kept.positions.equal(fresh.positions)
    assert not kept.recomputed.any()
    first_hidden = int((fresh.segments == fresh.names.index("system")).sum())
    assert not fresh.recomputed[0, :first_hidden].any()
    assert fresh.recomputed[0, first_hidden:].all()
