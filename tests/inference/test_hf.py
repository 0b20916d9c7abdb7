"""Caches of transformers, in and out: what is read after them is what the other library computes."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, Qwen3NextConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvprobe.cache.cache import KVCache
from kvprobe.cache.floors import floor_of_dtype
from kvprobe.inference.hf import FAR
from kvprobe.inference.model import Model, load
from kvprobe.text.tokens import Tokens
from tests.models import WINDOW, llama, mixtral
from tests.random_caches import assert_close_caches
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


def test_slots_that_a_sliding_layer_dropped_are_read_again(tiny_gemma: Model):
    past = read_by_transformers(tiny_gemma, ids(0))
    assert past.layers[0].keys.shape[2] == WINDOW - 1
    assert_close_caches(tiny_gemma.from_hf(past, Tokens.of(ids(0))), tiny_gemma.prefill(Tokens.of(ids(0))))


@pytest.mark.parametrize(
    "edit", [lambda c: c.rewind(slots=COUNT - WINDOW), lambda c: c.evict(slots=range(9)).reindex()]
)
def test_what_moves_the_window_back_is_right_after_a_cache_of_transformers(
    edit: Callable[[KVCache], KVCache], tiny_gemma: Model
):
    cache = tiny_gemma.from_hf(read_by_transformers(tiny_gemma, ids(0)), Tokens.of(ids(0)))
    taken, own = edit(cache), edit(tiny_gemma.prefill(Tokens.of(ids(0))))
    after = Tokens.of(ids(1, 5), "next", int(own.ledger.following[0]))
    torch.testing.assert_close(tiny_gemma.extend(taken, after)[1], tiny_gemma.extend(own, after)[1])


def padded(
    model: Model, rows: list[list[int]], how: str, left: bool
) -> tuple[DynamicCache, torch.Tensor, torch.Tensor]:
    """Rows read by transformers under an attention mask: the cache, the ids with padding, and the mask."""
    longest = max(map(len, rows))
    fill = [[1] * (longest - len(row)) for row in rows]
    whole = torch.tensor([[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, fill, strict=True)])
    mask = torch.tensor([[*(0 for _ in pad), *(1 for _ in row)] for row, pad in zip(rows, fill, strict=True)])
    mask = (
        mask if left else torch.tensor([[1] * len(row) + [0] * len(pad) for row, pad in zip(rows, fill, strict=True)])
    )
    given = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if how == "counted" else {}
    past = DynamicCache(config=model.lanes.plain.config)
    with torch.no_grad():
        model.lanes.plain(whole, attention_mask=mask, past_key_values=past, use_cache=True, **given)
    return past, whole, mask


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("how", ["counted", "by slot"])
def test_rows_read_under_an_attention_mask_are_the_rows_alone(how: str, left: bool, tiny: Model):
    rows = [ids(0, 17), ids(1, 19)]
    past, whole, mask = padded(tiny, rows, how, left)
    refused(lambda: tiny.from_hf(past, [Tokens.of(row) for row in whole.tolist()]), "attention_mask")
    for tokens in ([Tokens.of(row) for row in whole.tolist()], [Tokens.of(row) for row in rows]):
        cache = tiny.from_hf(past, tokens, attention_mask=mask)
        start = 2 if how == "by slot" and left else 0
        for row, (alone, begins) in enumerate(zip(rows, (start, 0), strict=True)):
            assert cache.ledger.following[row] == begins + len(alone)
            after = Tokens.of([5, 6, 7], start=begins + len(alone))
            expected = tiny.extend(tiny.prefill(Tokens.of(alone, start=begins)), after)[1]
            torch.testing.assert_close(tiny.extend(cache.rows([row]), after)[1], expected, atol=1e-4, rtol=1e-4)


def test_a_cache_that_is_not_what_the_model_reads_is_refused(tiny_llama: Model):
    tokens, whole = Tokens.of(ids(0)), torch.tensor([ids(0)])
    hidden = torch.ones_like(whole)
    hidden[0, 3] = 0
    past = DynamicCache()
    with torch.no_grad():
        tiny_llama.lanes.plain(whole, attention_mask=hidden, past_key_values=past, use_cache=True)
    refused(lambda: tiny_llama.from_hf(past, tokens), "with all slots before them in view")
    assert tiny_llama.from_hf(past, tokens, hidden).slots == COUNT - 1
    refused(lambda: tiny_llama.from_hf(past, tokens, hidden[:, 1:]), "`attention_mask` has shape (1, 18)")
    refused(lambda: tiny_llama.from_hf(past, tokens, hidden.float()), "`attention_mask` has shape")
    refused(lambda: tiny_llama.from_hf(past, tokens, hidden, position_ids=hidden), "slot")
    for wrong in ([[2**70] * COUNT], [[2**63] * COUNT], [[1], [1, 2]]):
        refused(lambda wrong=wrong: tiny_llama.from_hf(past, tokens, position_ids=wrong), "`position_ids` holds")
    other = llama(seed=3)
    past = read_by_transformers(tiny_llama, ids(0))
    refused(lambda: other.from_hf(past, tokens), "layer 0")
    past.layers[1].values[:] *= 1.2
    refused(lambda: tiny_llama.from_hf(past, tokens), "no cache that was edited")


def _other_weights(model: Model) -> DynamicCache:
    """A cache of which the first tokens were read with other weights, as with an adapter switched off midway."""
    past, whole, other = DynamicCache(), torch.tensor([ids(0)]), copy.deepcopy(model.lanes.plain)
    with torch.no_grad():
        weight = other.model.layers[0].self_attn.o_proj.weight
        weight.copy_(weight.flip(0))
        other(whole[:, :12], past_key_values=past)
        model.lanes.plain(whole[:, 12:], past_key_values=past)
    return past


def _one_slot(model: Model) -> DynamicCache:
    past = read_by_transformers(model, ids(0))
    past.layers[-1].values[:, :, -3] = 0
    return past


@pytest.fixture(scope="module")
def half_mixtral() -> Model:
    return load(mixtral().lanes.plain.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gemma", "half_mixtral"])
def test_every_key_and_value_is_held_against_a_reading(name: str, request: pytest.FixtureRequest, unchecked: None):
    """Only layer 0 and the last 16 tokens were, so that the next logits were off by 0.5."""
    model: Model = request.getfixturevalue(name)
    assert model.from_hf(read_by_transformers(model, ids(0)), Tokens.of(ids(0))).slots == COUNT
    for made in (_other_weights, _one_slot):
        past = made(model)
        refused(lambda past=past: model.from_hf(past, Tokens.of(ids(0))), "is not what the model reads")


@pytest.mark.parametrize("name", ["tiny_llama", "half_mixtral"])
def test_what_is_taken_over_is_off_by_no_more_than_caches_of_its_dtype(name: str, request: pytest.FixtureRequest):
    model: Model = request.getfixturevalue(name)
    full, floor = model.lanes.dtype == torch.float32, floor_of_dtype(model.lanes.dtype)
    every, most = slice(None), max(floor.newborn, floor.most_usual("V", 1.0))
    limits = [(slice(5, 6), floor.newborn)] if full else [(slice(5, 6), FAR), (every, most)]
    for (slots, limit), (times, taken) in product(limits, ((0.7, True), (1.3, False))):
        past = read_by_transformers(model, ids(0))
        past.layers[-1].values[:, :, slots] *= 1 + times * limit
        if taken:
            assert model.from_hf(past, Tokens.of(ids(0))).slots == COUNT
        else:
            refused(lambda past=past: model.from_hf(past, Tokens.of(ids(0))), "is not what the model reads")


def test_other_kernels_in_half_precision_are_taken_over_though_routers_choose_otherwise(half_mixtral: Model):
    plain = half_mixtral.lanes.plain
    plain.set_attn_implementation("eager")
    pasts = [read_by_transformers(half_mixtral, ids(seed, 60)) for seed in range(6)]
    plain.set_attn_implementation("sdpa")
    assert all(half_mixtral.from_hf(past, Tokens.of(ids(seed, 60))).slots == 60 for seed, past in enumerate(pasts))


def test_caches_whose_layers_were_cropped_are_right_or_refused(tiny_llama: Model, tiny_gemma: Model):
    past = read_by_transformers(tiny_llama, ids(0))
    past.crop(-2)
    cache = tiny_llama.from_hf(past, Tokens.of(ids(0)[:-2]))
    assert_close_caches(cache, tiny_llama.prefill(Tokens.of(ids(0)[:-2])))
    past.layers[1].keys = past.layers[1].keys[:, :, :-1]
    refused(lambda: tiny_llama.from_hf(past, Tokens.of(ids(0)[:-2])), "Layer 1 of the cache has read 16 tokens")
    past = read_by_transformers(tiny_gemma, ids(0))
    for layer in past.layers:
        layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
    refused(lambda: tiny_gemma.from_hf(past, Tokens.of(ids(0)[:-1])), "tokens")


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
    for other in (past.layers, tuple((layer.keys, layer.values) for layer in past.layers), {"layers": past.layers}):
        refused(lambda other=other: tiny_llama.from_hf(other, Tokens.of(tokens)), "; give a Cache")
    encoded = EncoderDecoderCache(past, DynamicCache())
    refused(lambda: tiny_llama.from_hf(encoded, Tokens.of(tokens)), "has no layers of its own; give a DynamicCache")
    short = DynamicCache()
    short.layers = [DynamicSlidingWindowLayer(WINDOW) for _ in past.layers]
    for layer, whole in zip(short.layers, past.layers, strict=True):
        layer.update(whole.keys, whole.values)
    refused(lambda: tiny_llama.from_hf(short, Tokens.of(tokens)), "lacks")
    hybrid = DynamicCache(config=Qwen3NextConfig(num_hidden_layers=3))
    refused(lambda: tiny_llama.from_hf(hybrid, Tokens.of(tokens)), "Layer 0 of the cache is a LinearAttentionLayer")
    static = StaticCache(tiny_llama.lanes.plain.config, max_cache_len=40)
    with torch.no_grad():
        tiny_llama.lanes.plain(torch.tensor([tokens]), past_key_values=static, use_cache=True)
    refused(lambda: tiny_llama.from_hf(static, Tokens.of(tokens)), "StaticLayer")


def test_a_cache_that_transformers_cannot_hold_is_refused(tiny_llama: Model):
    cache = tiny_llama.prefill(Tokens.of(ids(0)))
    for edited in (cache.mask(slots=[3]), cache.evict(slots=[3]), cache.mask(slots=[COUNT - 1]).reindex()):
        refused(lambda edited=edited: tiny_llama.to_hf(edited), "evict")
