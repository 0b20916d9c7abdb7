"""Patterns of the plain lane against those of TransformerLens, of transformers, and of plain arithmetic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import kvprobe as kv
from kvprobe.attention import Patterns, attend
from kvprobe.cache.cache import KVCache
from kvprobe.inference.forward import extend
from kvprobe.inference.model import Model, load
from kvprobe.text.tokens import Tokens
from tests.models import WINDOW
from tests.random_caches import random_tokens
from tests.refusals import refused

PROMPT = random_tokens(1, {"system": 4, "T1": 7, "summary": 5, "T2": 6})
SUFFIX = random_tokens(2, {"ask": 5, "answer": 4}, start=len(PROMPT))


def onwards(cache: KVCache) -> Tokens:
    return SUFFIX.shifted(int(cache.ledger.following[0]))


def holes(cache: KVCache) -> KVCache:
    """Different slots hidden in each layer and KV head, some everywhere."""
    rng = torch.Generator().manual_seed(3)
    live = torch.rand(cache.n_layers, 1, cache.n_kv_heads, cache.slots, generator=rng) < 0.6
    return replace(cache, ledger=replace(cache.ledger, live=live))


def padded(cache: KVCache) -> KVCache:
    """A row of a batch in which another kept more slots."""
    gone = torch.zeros(2, cache.slots, dtype=torch.bool)
    gone[0, 3:9] = True
    return cache.fork(2).evict(slots=gone).rows([0])


HISTORIES: dict[str, Callable[[KVCache], KVCache]] = {
    "untouched": lambda cache: cache,
    "masked": lambda cache: cache.mask("T1"),
    "masked in one layer and head": lambda cache: cache.mask("T1", layers=[1], heads=[0]).mask("system", layers=[2]),
    "holes": holes,
    "evicted": lambda cache: cache.evict("T1"),
    "re-indexed": lambda cache: cache.evict("T1").reindex(),
    "re-indexed naively": lambda cache: cache.evict("T1").reindex("naive"),
    "padded": padded,
}


@pytest.mark.parametrize("history", HISTORIES)
def test_both_lanes_show_the_same_patterns_after_any_history(tiny: Model, history: str):
    past = HISTORIES[history](tiny.prefill(PROMPT))
    if history == "re-indexed" and tiny.geometry.max_position is not None:
        refused(lambda: attend(tiny, onwards(past), past), "learned positions")
        return
    settings: dict[str, Any] = {"queries": range(len(SUFFIX))}
    plain, hooked = (attend(tiny, onwards(past), past, lane=lane, **settings) for lane in ("plain", "hooked"))
    assert plain.weights.shape == (3, 4, len(SUFFIX), past.slots + len(SUFFIX))
    assert torch.allclose(plain.weights, hooked.weights, atol=1e-5, rtol=0)
    assert torch.allclose(plain.weights.sum(-1), torch.ones(()), atol=1e-5)
    assert torch.equal(plain.queries, past.slots + torch.arange(len(SUFFIX)))


@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
@pytest.mark.parametrize("lane", ["plain", "hooked"])
def test_reading_in_chunks_changes_nothing(tiny: Model, chunk: int, lane: Any):
    past = tiny.prefill(PROMPT).mask("T1")
    text = onwards(past) + random_tokens(4, {"more": 8}, start=len(PROMPT) + len(SUFFIX))
    queries = [0, 5, 6, -1]
    whole = attend(tiny, text, past, queries=queries)
    chunked = attend(tiny, text, past, queries=queries, chunk=chunk, lane=lane)
    assert torch.allclose(chunked.weights, whole.weights, atol=1e-5, rtol=0)
    assert torch.equal(chunked.queries, whole.queries)
    assert torch.allclose(chunked.logits, whole.logits, atol=1e-4)
    assert torch.equal(chunked.cache.ledger.tokens, whole.cache.ledger.tokens)


def transformers_own(model: Model, tokens: Tokens) -> torch.Tensor:
    """`[layers, heads, queries, slots]`, as transformers reports them."""
    plain = model.lanes.plain
    before = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return torch.cat(plain(input_ids=torch.tensor([tokens.ids]), output_attentions=True).attentions)
    finally:
        plain.set_attn_implementation(before)


def test_patterns_are_those_that_transformers_reports(tiny: Model):
    patterns = attend(tiny, PROMPT, queries=range(len(PROMPT)))
    assert torch.allclose(patterns.weights, transformers_own(tiny, PROMPT), atol=1e-5, rtol=0)


def eager_model(kind: Any, config: Any) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    model.set_attn_implementation("eager")
    return load(model)


SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def test_softcapped_scores_give_the_patterns_that_transformers_reports():
    config = transformers.Gemma2Config(**SHAPE, attn_logit_softcapping=0.5, query_pre_attn_scalar=8)
    model = eager_model(transformers.Gemma2ForCausalLM, config)
    patterns = attend(model, PROMPT, queries=range(len(PROMPT)))
    assert torch.allclose(patterns.weights, transformers_own(model, PROMPT), atol=1e-5, rtol=0)


def test_learned_sinks_take_their_share_of_attention():
    config = transformers.GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    model = eager_model(transformers.GptOssForCausalLM, config)
    patterns = attend(model, PROMPT, queries=range(len(PROMPT)))
    assert torch.allclose(patterns.weights, transformers_own(model, PROMPT), atol=1e-5, rtol=0)
    assert 0.1 < patterns.weights.sum(-1).mean() < 0.95


def test_recording_patterns_changes_no_bit_of_the_pass(tiny: Model):
    past = tiny.prefill(PROMPT).mask("T1")
    for before in (None, past):
        text = PROMPT if before is None else onwards(before)
        cache, logits = extend(tiny.lanes, before, [text])
        patterns = attend(tiny, text, before)
        assert torch.equal(patterns.logits, logits[0, -1])
        assert all(torch.equal(keys, expected) for keys, expected in zip(patterns.cache.keys, cache.keys, strict=True))


def test_a_failed_recording_leaves_the_models_attention_unchanged(tiny: Model):
    def fail(attending: Any) -> None:
        raise KeyError("no more")

    before = tiny.lanes.plain.config._attn_implementation
    with pytest.raises(KeyError), tiny.lanes.observing_attention(fail):
        tiny.prefill(PROMPT)
    assert tiny.lanes.plain.config._attn_implementation == before == "sdpa"


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.size = max(self.size, made.numel())
        return made


def test_no_whole_pattern_is_made_for_one_query(tiny_llama: Model):
    text = random_tokens(5, {"long": 600})
    with Largest() as largest:
        attend(tiny_llama, text, chunk=100)
    assert largest.size < 600 * 600


# ---- what is chosen and what is made of it


@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        ("last", [21]),
        ("summary", [11, 12, 13, 14, 15]),
        (["system", "T2"], [0, 1, 2, 3, 16, 17, 18, 19, 20, 21]),
        ([-1, 2, 21, -22], [0, 2, 21]),
    ],
)
def test_queries_are_chosen_by_name_or_place(tiny_llama: Model, queries: Any, expected: list[int]):
    chosen = attend(tiny_llama, PROMPT, queries=queries)
    whole = attend(tiny_llama, PROMPT, queries=range(len(PROMPT)))
    assert chosen.queries.tolist() == expected
    assert torch.allclose(chosen.weights, whole.weights[:, :, expected], atol=1e-6)


def test_layers_come_in_the_order_asked_for(tiny_gemma: Model):
    whole = attend(tiny_gemma, PROMPT)
    for lane in ("plain", "hooked"):
        chosen = attend(tiny_gemma, PROMPT, layers=[2, 0], lane=lane)
        assert chosen.layers == (2, 0)
        assert torch.allclose(chosen.weights, whole.weights[[2, 0]], atol=1e-5)


def test_masked_slots_get_no_attention_where_they_are_masked(tiny_llama: Model):
    past = tiny_llama.prefill(PROMPT).mask("T1", layers=[0, 2], heads=[1])
    mass = attend(tiny_llama, onwards(past), past, queries="ask").mass("T1")
    blind = torch.zeros(3, 4, dtype=torch.bool)
    blind[[0, 2], 2:] = True
    assert (mass[blind] == 0).all()
    assert (mass[~blind] > 0).all()


def test_attention_to_all_segments_sums_to_one(tiny: Model):
    past = tiny.prefill(PROMPT).mask("T1")
    patterns = attend(tiny, onwards(past), past, queries="answer")
    table = patterns.df()
    assert table.columns.tolist() == ["layer", "head", "query", "text", "segment", "mass"]
    assert table.index.tolist() == [
        f"L{layer}H{head}" for layer, head in zip(table["layer"], table["head"], strict=True)
    ]
    assert set(table["text"]) == {
        tiny.tokenizer.decode([token]) for token in patterns.cache.ledger.tokens[0, -4:].tolist()
    }
    assert len(table) == 3 * 4 * 4 * 6
    assert table.groupby(["layer", "head", "query"])["mass"].sum().to_numpy() == pytest.approx(1, abs=1e-5)
    row = table.query("layer == 1 and head == 2 and query == 28 and segment == 'summary'")
    assert row["mass"].item() == pytest.approx(float(patterns.weights[1, 2, 1, 11:16].sum()))
    assert torch.equal(patterns.mass("system", "T2"), patterns.mass(slots=[*range(4), *range(16, 22)]))


def test_impossible_requests_are_refused(tiny_llama: Model, unchecked: None):
    cache = tiny_llama.prefill(PROMPT)
    patterns = attend(tiny_llama, PROMPT)
    refused(lambda: attend(tiny_llama, PROMPT, queries="sumary"), "'summary'")
    refused(lambda: attend(tiny_llama, PROMPT, queries=[22]), "22 tokens")
    refused(lambda: attend(tiny_llama, PROMPT, queries=[]), "No query")
    refused(lambda: attend(tiny_llama, PROMPT, layers=[3]), "layers 0 to 2")
    refused(lambda: attend(tiny_llama, PROMPT, chunk=0), "chunk=0, an int; give a whole number of at least 1")
    refused(lambda: attend(tiny_llama, "abc", cache.fork(2)), "2 rows")
    refused(lambda: attend(tiny_llama, Tokens.of([])), "nothing to read")
    refused(lambda: patterns.mass(slots=[0, 22]), "once each")
    refused(lambda: patterns.mass(slots=[1, 1]), "once each")
    refused(lambda: patterns.mass("T1", slots=[0]), "not both")
    refused(lambda: patterns.mass("T11"), "'T1'")


def test_kvprobe_exports_attend_and_patterns(tiny_llama: Model):
    assert kv.attend is attend
    assert kv.Patterns is Patterns
    assert kv.attention.roles.__doc__
