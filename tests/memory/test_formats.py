"""Bytes of weights as they are stored: published sizes, and each packing by hand."""

from typing import Any

import pytest

from kvprobe.memory.budget import budget
from kvprobe.memory.config import Config
from kvprobe.memory.formats import weight_bytes
from kvprobe.memory.numbers import FORMATS
from kvprobe.memory.weights import Weights
from tests.refusals import refused

COUNTED = Weights(embedding=1000, head=500, linear=12_800, experts=6400, other=30)
BFLOAT16 = FORMATS["bfloat16"]


def stored(packing: dict[str, Any] | None, **fields: Any) -> int:
    quantised = {} if packing is None else {"quantization_config": packing}
    return weight_bytes(
        COUNTED, Config("Tiny", {"model_type": "llama", "hidden_size": 64, **quantised, **fields}), BFLOAT16
    )


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("openai/gpt-oss-20b", 13.761),
        ("openai/gpt-oss-120b", 65.249),
        ("deepseek-ai/DeepSeek-V3.1", 673.15),
        ("Qwen/Qwen3-8B", 16.381),
        ("google/gemma-3-27b-it", 54.018),
    ],
)
def test_weights_of_published_models_take_what_their_files_do(name: str, gigabytes: float):
    # In vLLM's budget, since transformers keeps DeepSeek's routers in float32.
    assert budget(name, dtype="bfloat16", engine="vllm").weights / 1e9 == pytest.approx(gigabytes, rel=1e-4)


def test_without_packing_all_weights_are_floats():
    assert stored(None) == 2 * 20_730


def test_what_stays_in_float32_takes_four_bytes_unless_it_is_packed():
    wide = Weights(embedding=10, linear=20, other=30)
    config = Config("Tiny", {"model_type": "llama", "hidden_size": 64})
    assert weight_bytes(COUNTED, config, BFLOAT16, wide) == stored(None) + 2 * 60
    packed = Config("Tiny", {**config.fields, "quantization_config": {"quant_method": "fp8"}})
    assert weight_bytes(COUNTED, packed, BFLOAT16, wide) == stored({"quant_method": "fp8"}) + 2 * 40


def test_mxfp4_packs_only_experts_with_a_byte_for_32():
    assert stored({"quant_method": "mxfp4"}) == 6400 // 2 + 6400 // 32 + 2 * (20_730 - 6400)


def test_fp8_packs_matrices_with_a_float_for_each_block():
    rest = 2 * (20_730 - 19_200)
    assert stored({"quant_method": "fp8", "weight_block_size": [10, 64]}) == 19_200 + 30 * 4 + rest
    assert stored({"quant_method": "fp8"}) == 19_200 + 4 + rest


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_groups_have_a_scale_and_a_zero(method: str):
    rest = 2 * (20_730 - 19_200)
    assert stored({"quant_method": method, "bits": 4, "group_size": 128}) == 9600 + 150 * 20 // 8 + rest
    assert stored({"quant_method": method, "bits": 8, "group_size": 64}) == 19_200 + 300 * 24 // 8 + rest
    # A group of −1 is a column, here of 64.
    assert stored({"quant_method": method, "bits": 4, "group_size": -1}) == 9600 + 300 * 20 // 8 + rest


def test_bitsandbytes_needs_no_name_and_may_quantise_its_scales():
    rest = 2 * (20_730 - 19_200)
    assert stored({"load_in_8bit": True}) == 19_200 + rest
    assert stored({"load_in_4bit": True}) == 9600 + 300 * 4 + rest
    assert stored({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}) == 9600 + 300 + rest


@pytest.mark.parametrize("fields", [{"compression_config": {}}, {"compression_config": {"quant_method": "x"}}])
def test_an_unknown_packing_is_refused_unless_its_bytes_are_given(fields: dict[str, Any]):
    refused(lambda: stored(None, **fields), "weights=")
    config = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, **fields,
    }  # fmt: skip
    assert budget(config, weights="5GB").weights == 5 * 10**9
