"""Counts of weights are those of the models that transformers builds, sorted by what file formats do with them."""

from pathlib import Path

import pytest

import kvprobe as kv
from kvprobe.memory.config import Config
from kvprobe.memory.unloaded import text_model, unloaded
from kvprobe.memory.weights import Weights
from tests.memory.families import TINY, settings, tiny
from tests.models import every
from tests.refusals import refused

LLAMA = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
ATTENTION = 8 * 8 + 2 * 8 * 4 + 8 * 8
NORMS = 2 * 8 * 3 + 8


def counted(**fields: object) -> Weights:
    return unloaded(text_model(Config("tiny", {**LLAMA, **fields}))).weights


@pytest.mark.parametrize("name", TINY)
def test_counts_are_those_of_the_model(name: str):
    weights = unloaded(text_model(Config(name, settings(name)))).weights
    assert weights.total == sum(parameter.numel() for parameter in tiny(name)[0].parameters())


def test_parameters_are_sorted_by_what_formats_pack():
    dense = 3 * 8 * 12
    assert counted() == Weights(80, 80, 3 * (ATTENTION + dense), 0, NORMS)
    assert counted(tie_word_embeddings=True) == Weights(80, 0, 3 * (ATTENTION + dense), 0, NORMS)
    biases = 3 * (8 + 4 + 4 + 8)
    assert counted(attention_bias=True) == Weights(80, 80, 3 * (ATTENTION + dense), 0, NORMS + biases)
    mixture = counted(model_type="mixtral", num_local_experts=5)
    assert mixture == Weights(80, 80, 3 * ATTENTION, 3 * 5 * dense, NORMS + 3 * 5 * 8)


def test_learned_positions_are_embeddings_and_gpt2_has_matrices_too():
    weights = counted(model_type="gpt2", n_embd=8, n_layer=3, n_head=4, n_positions=20, n_inner=12)
    assert weights == Weights(80 + 160, 0, 3 * (4 * 64 + 2 * 96), 0, NORMS + 8 * 7 + 3 * (4 * 8 + 12 + 8))


def test_routers_and_gates_of_shared_experts_are_not_packed():
    sizes = {"num_experts": 4, "moe_intermediate_size": 6, "shared_expert_intermediate_size": 5, "qkv_bias": False}
    weights = counted(model_type="qwen2_moe", decoder_sparse_step=1, **sizes)
    assert weights.experts == 3 * 4 * 3 * 8 * 6
    assert weights.linear == 3 * (ATTENTION + 3 * 8 * 5)
    assert weights.other == NORMS + 3 * (4 * 8 + 8)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_token_uses_as_many_experts_as_it_is_sent_to(kind: str):
    sizes = {"num_local_experts": 8, "num_experts": 8, "moe_intermediate_size": 6}
    built = unloaded(text_model(Config("tiny", {**LLAMA, **sizes, "model_type": kind, "num_experts_per_tok": 2})))
    weights = built.weights
    assert weights.active(built.config) == weights.total - weights.experts * 6 // 8


def test_without_experts_every_parameter_is_active():
    assert counted().active(Config("tiny", {})) == counted().total


def test_more_experts_for_a_token_than_there_are_is_refused():
    few = Config("tiny", {"num_experts": 4, "num_experts_per_tok": 5})
    refused(lambda: Weights(experts=8).active(few), "5 of 4 experts")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "kind",
    ["llama", "deepseek_v32", "gpt_oss", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v4", "kimi_linear", "nemotron_h",
     "olmo_hybrid"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_parameters_that_loading_keeps_in_float32_are_counted_so(kind: str, dtype: str, tmp_path: Path):
    model = every.tiny(kind)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    held = sum(parameter.nbytes for parameter in loaded.parameters())
    assert kv.budget(tmp_path, context=8, dtype=dtype).weights == held
