"""Blocks of vLLM against the worked examples of its source, and against what holds of any pool of blocks."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.memory.budget import budget
from kvprobe.memory.caches import AttentionStore, LayerStore
from kvprobe.memory.numbers import FORMATS
from kvprobe.memory.request import Request
from kvprobe.memory.sources import config_of, shipped_configs
from kvprobe.memory.unloaded import text_model, unloaded
from kvprobe.memory.vllm import Engine, reserved
from kvprobe.memory.written import plan_of
from tests.refusals import refused

GEMMA = "google/gemma-3-27b-it"
GPT_OSS = "openai/gpt-oss-120b"
SCOUT = "meta-llama/Llama-4-Scout-17B-16E-Instruct"
QWEN = "Qwen/Qwen3-8B"
QWEN_NEXT = "Qwen/Qwen3-Next-80B-A3B-Instruct"
DEEPSEEK = "deepseek-ai/DeepSeek-V3.1"

LONG = 131_072

contexts = st.integers(1, 40_000)
engines = st.builds(
    Engine,
    block=st.sampled_from([1, 8, 16, 32, 128]),
    batched_tokens=st.sampled_from([1, 512, 8192]),
    steps=st.sampled_from([1, 2]),
)


@cache
def layers(name: str) -> tuple[LayerStore, ...]:
    return unloaded(text_model(config_of(name))).layers


def request(context: int, numbers: str = "bfloat16") -> Request:
    return Request(context, numbers=FORMATS[numbers])


def per_token(name: str, numbers: str, context: int = 160, **engine: int) -> list[float]:
    """Bytes of each layer's pages for each token, at a context that fills its blocks."""
    return [pages / context for pages in reserved(layers(name), request(context, numbers), Engine(**engine)).pages]


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        (GEMMA, 1, 15_275_130_880),
        (GEMMA, 2, 19_301_662_720),
        (GPT_OSS, 1, 5_139_136_512),
        (GPT_OSS, 2, 5_441_126_400),
        (SCOUT, 1, 8_858_370_048),
        (SCOUT, 2, 10_066_329_600),
    ],
)
def test_a_conversation_takes_the_bytes_of_vllms_own_examples(name: str, steps: int, expected: int):
    assert reserved(layers(name), request(LONG), Engine(steps=steps)).bytes == expected


def test_a_budget_counts_vllm_with_two_steps_in_flight():
    assert budget(GEMMA, engine="vllm", context=LONG).cache == 19_301_662_720


def test_blocks_of_a_hybrid_model_grow_until_a_page_of_attention_holds_a_state():
    reservation = reserved(layers(QWEN_NEXT), request(LONG), Engine())
    assert (reservation.block, reservation.bytes) == (544, 3_302_227_968)


@pytest.mark.parametrize("ranks", [2, 8, 16, 128])
def test_every_rank_holds_the_whole_latent_cache(ranks: int):
    whole, shared = (reserved(layers(DEEPSEEK), request(LONG), Engine(ranks=count)) for count in (1, ranks))
    assert shared.pages == whole.pages


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)])
def test_ranks_divide_kv_heads_down_to_one_each(ranks: int, heads: int):
    assert per_token(QWEN, "bfloat16", ranks=ranks) == [heads * (128 + 128) * 2] * 36


def test_ranks_divide_states():
    one, two = (
        reserved(layers("state-spaces/mamba-2.8b-hf"), request(9), Engine(ranks=ranks)).bytes for ranks in (1, 2)
    )
    assert one == 2 * two > 0


@given(context=contexts, engine=engines, reach=st.integers(1, 5000))
def test_a_window_takes_at_most_one_block_more(context: int, engine: Engine, reach: int):
    windowed, full = (
        reserved((LayerStore(AttentionStore(4, 2, 64, 64, reach=window)),), request(context), engine)
        for window in (reach, None)
    )
    assert windowed.blocks <= full.blocks + 1
    if context >= reach + engine.steps * engine.batched_tokens + 2 * engine.block:
        assert windowed.blocks < full.blocks


@given(context=contexts, engine=engines, reach=st.integers(1, 5000))
def test_chunks_never_take_more_than_full_attention(context: int, engine: Engine, reach: int):
    chunked, full = (
        reserved(
            (LayerStore(AttentionStore(4, 2, 64, 64, reach=window, chunked=window is not None)),),
            request(context),
            engine,
        )
        for window in (reach, None)
    )
    assert chunked.blocks <= full.blocks


@pytest.mark.parametrize(("context", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_partly_used_block_is_counted_whole(context: int, blocks: int):
    reservation = reserved(layers(QWEN), request(context), Engine())
    assert reservation.blocks == blocks
    assert reservation.bytes == sum(reservation.pages) == blocks * 16 * 147_456


def test_layers_that_share_keys_and_values_take_no_bytes():
    reservation = reserved(layers("google/gemma-3n-E4B-it"), request(LONG), Engine())
    assert [pages > 0 for pages in reservation.pages] == [number < 20 for number in range(35)]


@given(name=st.sampled_from(sorted(shipped_configs())), context=contexts, engine=engines)
@settings(max_examples=60)
def test_layers_never_use_more_than_is_reserved(name: str, context: int, engine: Engine):
    reservation = reserved(layers(name), request(context), engine)
    assert 0 < sum(reservation.pages) <= reservation.bytes
    kinds = {(layer.attention and layer.attention.reach, layer.state, layer.shares is None) for layer in layers(name)}
    if len(kinds) == 1:
        assert sum(reservation.pages) == reservation.bytes


@given(name=st.sampled_from(sorted(shipped_configs())), context=contexts, more=st.integers(0, 5000), engine=engines)
@settings(max_examples=60)
def test_a_longer_conversation_never_takes_fewer_blocks(name: str, context: int, more: int, engine: Engine):
    shorter, longer = (reserved(layers(name), request(length), engine) for length in (context, context + more))
    assert shorter.block_bytes == longer.block_bytes
    assert shorter.blocks <= longer.blocks


@pytest.mark.parametrize(
    ("numbers", "head_bytes"),
    [
        ("float32", 4 * 256),
        ("float16", 2 * 256),
        ("fp8", 256),
        ("int8_per_token_head", 256 + 8),
        ("int4_per_token_head", 128 + 8),
        ("nvfp4", 128 + 16),
    ],
)
def test_formats_take_their_bits_and_their_scales_in_each_head(numbers: str, head_bytes: int):
    assert per_token(QWEN, numbers) == [8 * head_bytes] * 36


def test_latent_attention_in_its_own_format_takes_656_bytes_a_token():
    assert per_token(DEEPSEEK, "fp8_ds_mla") == [512 + 4 * 4 + 64 * 2] * 61


@pytest.mark.parametrize("name", [QWEN, DEEPSEEK, GEMMA, SCOUT])
def test_fp8_is_half_of_bfloat16_layer_by_layer(name: str):
    half, whole = per_token(name, "fp8"), per_token(name, "bfloat16")
    assert [2 * size for size in half] == whole


def test_an_index_of_keys_is_fp8_with_a_scale_whatever_the_latent_is_stored_in():
    indexed = (LayerStore(AttentionStore(128, 1, 512, 64, latent=True, d_index=128)),)
    for numbers, expected in (("bfloat16", 576 * 2 + 132), ("fp8_ds_mla", 656 + 132)):
        assert reserved(indexed, request(16, numbers), Engine()).bytes == 16 * expected


@pytest.mark.parametrize(
    ("name", "choices", "said"),
    [
        (QWEN, {"cache_dtype": "int4"}, "int4"),
        (QWEN, {"cache_dtype": "int2"}, "int2"),
        (QWEN, {"cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla"),
        (DEEPSEEK, {"cache_dtype": "nvfp4"}, "nvfp4"),
        (DEEPSEEK, {"cache_dtype": "int8_per_token_head"}, "int8_per_token_head"),
        (QWEN, {"ranks": 3}, "3 ranks"),
        (QWEN, {"ranks": 64}, "64 ranks"),
        (DEEPSEEK, {"policy": "SinkWindow(4, 60)"}, "SinkWindow(4, 60)"),
        (QWEN, {"policy": "Quantise(4)"}, "Quantise(4)"),
        (QWEN, {"block": 0}, "block"),
        (QWEN, {"batched_tokens": 0}, "batched_tokens"),
    ],
)
def test_caches_that_vllm_lacks_are_refused_in_a_sentence(name: str, choices: dict[str, int | str], said: str):
    refused(lambda: budget(name, engine="vllm", **choices), said)


def test_the_format_of_512_and_64_numbers_is_refused_for_another_latent():
    refused(
        lambda: reserved(
            (LayerStore(AttentionStore(16, 1, 256, 64, latent=True)),), request(16, "fp8_ds_mla"), Engine()
        ),
        "512 + 64",
    )


def test_all_policies_are_refused():
    for policy in ("TOVA(8)", "Quantise(2)"):
        refused(lambda policy=policy: reserved(layers(QWEN), Request(16, plan=plan_of(policy)), Engine()), "no policy")
