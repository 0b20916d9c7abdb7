"""Caches of transformers, in and out: what is read after them is what the other library computes."""

import pytest
import torch
from transformers import DynamicCache, Qwen3NextConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens
from tests.models import WINDOW
from tests.refusals import refused

COUNT = 2 * WINDOW + 3


def ids(seed: int, count: int = COUNT) -> list[int]:
    return torch.randint(2, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_by_transformers(model: Model, tokens: list[int]) -> DynamicCache:
    plain = model.lanes.plain
    past = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(torch.tensor([tokens]), past_key_values=past, use_cache=True)
    return past


@pytest.mark.parametrize("count", [3, COUNT])
def test_what_is_read_after_a_cache_of_transformers_is_what_transformers_computes(tiny: Model, count: int):
    before, after = ids(0, count), ids(1, 5)
    cache = tiny.from_hf(read_by_transformers(tiny, before), Tokens.of(before))
    _, logits = tiny.extend(cache, Tokens.of(after, "next", count), logits=5)
    with torch.no_grad():
        expected = tiny.lanes.plain(torch.tensor([before + after])).logits[:, -5:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_slots_that_a_sliding_layer_dropped_are_not_live_in_it(tiny_gemma: Model):
    cache = tiny_gemma.from_hf(read_by_transformers(tiny_gemma, ids(0)), Tokens.of(ids(0)))
    live = cache.ledger.live[:, 0, 0].sum(1).tolist()
    assert live == [WINDOW - 1, WINDOW - 1, COUNT]


def test_transformers_reads_on_after_a_cache_of_kvprobe(tiny: Model):
    whole, after = tiny.prefill(Tokens.of(ids(0))), ids(1, 5)
    evicted = [whole.evict(slots=[2, 5]).reindex()] if tiny.lanes.can_reindex else []
    for cache in (whole, *evicted):
        with torch.no_grad():
            past = tiny.to_hf(cache)
            logits = tiny.lanes.plain(torch.tensor([after]), past_key_values=past, use_cache=True).logits
        _, expected = tiny.extend(cache, Tokens.of(after, "next", cache.slots), logits=5)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_cache_of_other_tokens_positions_or_kind_is_refused(tiny_llama: Model, unchecked: None):
    past, tokens = read_by_transformers(tiny_llama, ids(0)), ids(0)
    refused(lambda: tiny_llama.from_hf(past, Tokens.of([*tokens[:-1], tokens[-1] + 1])), f"slot {COUNT - 1}")
    refused(lambda: tiny_llama.from_hf(past, Tokens.of(tokens, start=1)), "slot 0")
    refused(lambda: tiny_llama.from_hf(past, Tokens.of(tokens[:-1])), f"{COUNT} tokens")
    refused(lambda: tiny_llama.from_hf(past, [Tokens.of(tokens), Tokens.of(tokens)]), "1 rows")
    refused(lambda: tiny_llama.from_hf(DynamicCache(), Tokens.of(tokens)), "no layer")
    refused(lambda: tiny_llama.from_hf(past.layers, Tokens.of(tokens)), "a cache of transformers")
    short = DynamicCache()
    short.layers = [DynamicSlidingWindowLayer(WINDOW) for _ in past.layers]
    for layer, whole in zip(short.layers, past.layers, strict=True):
        layer.update(whole.keys, whole.values)
    refused(lambda: tiny_llama.from_hf(short, Tokens.of(tokens)), "lacks")
    hybrid = DynamicCache(config=Qwen3NextConfig(num_hidden_layers=4))
    refused(lambda: tiny_llama.from_hf(hybrid, Tokens.of(tokens)), "Layer 0 of the cache is a LinearAttentionLayer")
    static = StaticCache(tiny_llama.lanes.plain.config, max_cache_len=40)
    with torch.no_grad():
        tiny_llama.lanes.plain(torch.tensor([tokens]), past_key_values=static, use_cache=True)
    refused(lambda: tiny_llama.from_hf(static, Tokens.of(tokens)), "StaticLayer")


def test_a_cache_that_transformers_cannot_hold_is_refused(tiny_llama: Model):
    cache = tiny_llama.prefill(Tokens.of(ids(0)))
    for edited in (cache.mask(slots=[3]), cache.evict(slots=[3]), cache.mask(slots=[COUNT - 1]).reindex()):
        refused(lambda edited=edited: tiny_llama.to_hf(edited), "evict")
