"""Counts from configs against the parameters of the models that transformers builds from them."""

import json
import re
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, MllamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kvprobe.memory.config import Config
from kvprobe.memory.layer_types import KINDS
from kvprobe.memory.weights import Weights, active, weights
from tests.refusals import refused

Fields = dict[str, Any]

SIZES: Fields = {
    "vocab_size": 83,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""All different, so that none can stand for another."""

GPT2: Fields = {"n_embd": 48, "n_layer": 5, "n_head": 6, "n_positions": 67, "vocab_size": 83}
MOE: Fields = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 22}
QWEN_MOE = MOE | {"shared_expert_intermediate_size": 26}
LOCAL_MOE: Fields = {"num_local_experts": 7, "num_experts_per_tok": 3}
DELTA_NET: Fields = {
    "linear_key_head_dim": 9,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 5,
}
LATENT: Fields = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 17,
    "q_lora_rank": 23,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 7,
    "n_shared_experts": 3,
    "moe_intermediate_size": 22,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA: Fields = {"state_size": 9, "conv_kernel": 5}
MAMBA2: Fields = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 11,
    "mamba_d_conv": 5,
    "mamba_expand": 2,
}
JAMBA = MOE | {"mamba_d_state": 9, "mamba_d_conv": 5}
HYBRID = ["mamba", "attention", "mamba", "mamba", "attention"]
GEMMA3N: Fields = {
    "head_dim": 10,
    "vocab_size_per_layer_input": 59,
    "hidden_size_per_layer_input": 13,
    "laurel_rank": 7,
    "altup_num_inputs": 3,
    "num_kv_shared_layers": 0,
}
NEMOTRON: Fields = {
    "head_dim": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 7,
    "ssm_state_size": 11,
    "n_groups": 2,
    "conv_kernel": 5,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "moe_shared_expert_intermediate_size": 26,
}
ATTENTION_BIAS: Fields = {"attention_bias": True}
NO_ATTENTION_BIAS: Fields = {"attention_bias": False}
MLP_BIAS: Fields = {"mlp_bias": True}
WINDOW: Fields = {"sliding_window": 4}

WITH_GPT2_NAMES = ("gpt2", "gpt_bigcode", "gptj")

CASES: dict[str, list[Fields]] = {
    "llama": [{}, {"num_key_value_heads": None}, ATTENTION_BIAS, MLP_BIAS, {"head_dim": 10}],
    "granite": [{}, ATTENTION_BIAS, MLP_BIAS],
    "smollm3": [{}, ATTENTION_BIAS, MLP_BIAS, {"no_rope_layers": [1, 1, 0, 1, 0]}],
    "seed_oss": [{"head_dim": 10}, {"head_dim": 10, "attention_out_bias": True}, NO_ATTENTION_BIAS | MLP_BIAS],
    "mistral": [{}, {"head_dim": 10}, {"sliding_window": None}],
    "ministral3": [{"head_dim": 10}, {}],
    "phi3": [{}, WINDOW],
    "gemma": [{"head_dim": 10}, {"head_dim": 10} | ATTENTION_BIAS],
    "gemma2": [{"head_dim": 10} | WINDOW, {"head_dim": 10} | ATTENTION_BIAS],
    "gemma3_text": [{"head_dim": 10} | WINDOW, {"head_dim": 10} | ATTENTION_BIAS],
    "gemma3n_text": [
        GEMMA3N,
        GEMMA3N | ATTENTION_BIAS,
        GEMMA3N
        | {"num_kv_shared_layers": 3}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]},
        GEMMA3N | {"intermediate_size": [20, 20, 30, 44, 44]},
    ],
    "qwen2": [{}, {"use_sliding_window": True, "max_window_layers": 2} | WINDOW],
    "qwen3": [{"head_dim": 10}, ATTENTION_BIAS],
    "exaone4": [WINDOW, {"sliding_window": None, "layer_types": ["full_attention"] * 5}],
    "olmo": [{}, ATTENTION_BIAS],
    "olmo2": [{}, ATTENTION_BIAS],
    "olmo3": [WINDOW, ATTENTION_BIAS],
    "cohere": [{}, {"use_qk_norm": True}, ATTENTION_BIAS],
    "cohere2": [WINDOW, ATTENTION_BIAS],
    "glm": [{"head_dim": 10}, {"head_dim": 10} | NO_ATTENTION_BIAS],
    "glm4": [{"head_dim": 10}, {"head_dim": 10} | NO_ATTENTION_BIAS],
    "stablelm": [{}, {"head_dim": 10}, {"use_qkv_bias": True}, {"qk_layernorm": True}, {"use_parallel_residual": True}],
    "mllama_text_model": [{"cross_attention_layers": [1, 3, 4]}, {"cross_attention_layers": []}],
    "gpt2": [GPT2, GPT2 | {"n_inner": 70}, GPT2 | {"add_cross_attention": True}],
    "gpt_bigcode": [
        GPT2,
        GPT2 | {"n_inner": 70},
        GPT2 | {"multi_query": False},
        GPT2 | {"multi_query": False, "add_cross_attention": True},
    ],
    "gptj": [GPT2 | {"rotary_dim": 4}, GPT2 | {"rotary_dim": 4, "n_inner": 70}],
    "gpt_neox": [{}, NO_ATTENTION_BIAS, {"use_parallel_residual": False}],
    "starcoder2": [WINDOW, {"use_bias": False}],
    "phi": [{}, {"qk_layernorm": True}, {"num_key_value_heads": None}],
    "falcon": [
        {},
        {"bias": True},
        {"multi_query": False},
        {"parallel_attn": False, "alibi": True},
        {"num_ln_in_parallel_attn": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"new_decoder_architecture": True, "num_kv_heads": None, "ffn_hidden_size": 70},
        {"multi_query": None, "parallel_attn": None},
    ],
    "mixtral": [LOCAL_MOE, LOCAL_MOE | {"head_dim": 10}],
    "granitemoe": [LOCAL_MOE, LOCAL_MOE | ATTENTION_BIAS],
    "olmoe": [MOE, MOE | ATTENTION_BIAS],
    "phimoe": [LOCAL_MOE, LOCAL_MOE | ATTENTION_BIAS, LOCAL_MOE | {"lm_head_bias": True}],
    "gpt_oss": [LOCAL_MOE | {"head_dim": 10}, LOCAL_MOE | NO_ATTENTION_BIAS | WINDOW],
    "qwen2_moe": [
        QWEN_MOE,
        QWEN_MOE | {"qkv_bias": False},
        QWEN_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 3]},
    ],
    "qwen3_moe": [
        MOE | {"head_dim": 10},
        MOE | ATTENTION_BIAS,
        MOE | {"mlp_only_layers": [0, 4]},
        MOE | {"num_experts": 0},
    ],
    "qwen3_next": [
        QWEN_MOE | DELTA_NET | {"head_dim": 10},
        QWEN_MOE | DELTA_NET | ATTENTION_BIAS | {"full_attention_interval": 2, "decoder_sparse_step": 3},
    ],
    "qwen3_5_text": [DELTA_NET | {"head_dim": 10}, DELTA_NET | ATTENTION_BIAS | {"full_attention_interval": 2}],
    "llama4_text": [
        LOCAL_MOE | {"head_dim": 10, "intermediate_size_mlp": 38},
        LOCAL_MOE | {"head_dim": 10, "intermediate_size_mlp": 38, "interleave_moe_layer_step": 2} | ATTENTION_BIAS,
        LOCAL_MOE | {"intermediate_size_mlp": 38, "moe_layers": [0, 3]},
    ],
    "deepseek_v2": [
        LATENT,
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 2},
        LATENT | ATTENTION_BIAS,
        LATENT | MLP_BIAS | {"first_k_dense_replace": 1},
    ],
    "deepseek_v3": [
        LATENT,
        LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0},
        LATENT | ATTENTION_BIAS | {"first_k_dense_replace": 9},
    ],
    "deepseek_v32": [
        LATENT | {"index_n_heads": 5, "index_head_dim": 18},
        LATENT | ATTENTION_BIAS | {"index_n_heads": 5, "index_head_dim": 18, "first_k_dense_replace": 1},
        LATENT
        | {"index_n_heads": 5, "index_head_dim": 18}
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]},
    ],
    "mamba": [MAMBA, MAMBA | {"use_bias": True, "use_conv_bias": False, "expand": 3}, MAMBA | {"time_step_rank": 7}],
    "falcon_mamba": [MAMBA, MAMBA | {"use_bias": True, "use_conv_bias": False, "expand": 3}],
    "mamba2": [
        MAMBA | {"num_heads": 8, "head_dim": 12, "n_groups": 2},
        MAMBA | {"num_heads": 6, "head_dim": 24, "n_groups": 3, "expand": 3, "use_bias": True, "use_conv_bias": False},
    ],
    "jamba": [
        JAMBA | {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 7},
        JAMBA
        | {"attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_period": 3, "expert_layer_offset": 2}
        | {"mamba_expand": 3, "mamba_proj_bias": True, "mamba_conv_bias": False},
        JAMBA | {"num_experts": 1, "num_experts_per_tok": 1, "attn_layer_period": 3, "attn_layer_offset": 1},
    ],
    "bamba": [
        MAMBA2 | {"attn_layer_indices": [1, 4]},
        MAMBA2 | ATTENTION_BIAS | MLP_BIAS | {"mamba_proj_bias": True, "mamba_conv_bias": False},
        MAMBA2 | {"mamba_conv_bias": None, "attn_layer_indices": [0]},
    ],
    "granitemoehybrid": [
        MAMBA2 | LOCAL_MOE | {"layer_types": HYBRID, "shared_intermediate_size": 26},
        MAMBA2 | ATTENTION_BIAS | {"layer_types": HYBRID, "shared_intermediate_size": 26, "num_local_experts": 0},
        MAMBA2 | LOCAL_MOE | {"shared_intermediate_size": 26, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ],
    "falcon_h1": [
        MAMBA2 | {"mamba_d_ssm": 40, "mamba_d_head": 5},
        MAMBA2 | {"mamba_d_ssm": None, "mamba_rms_norm": True, "head_dim": 10},
        MAMBA2 | ATTENTION_BIAS | MLP_BIAS | {"mamba_d_ssm": 40, "mamba_d_head": 5, "mamba_proj_bias": True},
        MAMBA2 | {"mamba_d_ssm": 40, "mamba_d_head": 5, "projectors_bias": True, "mamba_conv_bias": False},
    ],
    "nemotron_h": [
        NEMOTRON | {"hybrid_override_pattern": "M-M*-"},
        NEMOTRON | {"hybrid_override_pattern": "MEM*EE-", "use_bias": True, "use_conv_bias": False},
        NEMOTRON | MLP_BIAS | {"layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"], "moe_latent_size": 15},
        NEMOTRON | MLP_BIAS | {"hybrid_override_pattern": "-*"},
    ],
    "lfm2": [
        {"full_attn_idxs": [1, 3], "conv_L_cache": 4, "block_multiple_of": 9},
        {"full_attn_idxs": [0], "conv_L_cache": 4, "conv_bias": True, "block_auto_adjust_ff_dim": False},
        {"full_attn_idxs": [0], "conv_L_cache": 4}
        | {"block_multiple_of": 7, "block_ffn_dim_multiplier": 1.3, "block_ff_dim": 90},
        {"layer_types": ["conv", "conv", "full_attention", "conv", "conv"], "conv_L_cache": 4, "tie_embedding": False},
    ],
}  # fmt: skip

ALL = [
    pytest.param(kind, fields | tied, id="-".join((kind, str(number), *map(str, tied.values()))))
    for kind, cases in CASES.items()
    for number, fields in enumerate(cases)
    for tied in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False})[: 1 if number else None]
]


def terse(kind: str, fields: Fields) -> Config:
    """With the fields that are given, and no more."""
    return Config(f"tiny {kind}", {"model_type": kind} | (GPT2 if kind in WITH_GPT2_NAMES else SIZES) | fields)


def config_of(kind: str, fields: Fields) -> Config:
    """As it is saved with a model."""
    return Config(f"tiny {kind}", saved(kind, dict(terse(kind, fields).fields)))


def saved(kind: str, fields: Fields) -> Fields:
    given = {name: value for name, value in fields.items() if name != "model_type"}
    return json.loads(json.dumps(AutoConfig.for_model(kind, **given).to_dict()))


def model_of(config: Config) -> PreTrainedModel:
    """Without storage."""
    given = {name: value for name, value in config.fields.items() if name != "model_type"}
    build = MllamaForCausalLM._from_config if config.kind == "mllama_text_model" else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return build(AutoConfig.for_model(config.kind, **given))


def sorted_out(model: PreTrainedModel) -> Weights:
    """The parameters by the modules that they are in."""
    head = "lm_head.weight"
    modules = dict(model.named_modules())
    sizes = dict.fromkeys(("embedding", "head", "linear", "experts", "other"), 0)
    for name, parameter in model.named_parameters():
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, nn.Embedding):
            kind = "embedding"
        elif name == head:
            kind = "head"
        elif ".experts." in name and parameter.ndim == 3:
            kind = "experts"
        elif isinstance(module, nn.Linear | Conv1D) and parameter.ndim == 2 and not SMALL.search(name):
            kind = "linear"
        else:
            kind = "other"
        sizes[kind] += parameter.numel()
    return Weights(**sizes)


SMALL = re.compile(r"router|shared_expert_gate|altup\.")
"""Matrices that no format packs."""


@pytest.mark.parametrize(("kind", "fields"), ALL)
def test_counts_are_those_of_the_model(kind: str, fields: Fields):
    config = config_of(kind, fields)
    model = model_of(config)
    assert weights(config) == weights(terse(kind, fields)) == sorted_out(model)
    assert weights(config).total == sum(parameter.numel() for parameter in model.parameters())


def test_every_family_is_counted():
    assert set(CASES) == KINDS


@pytest.mark.parametrize("kind", CASES)
def test_a_missing_field_is_refused_or_has_the_default_of_transformers(kind: str):
    taken = 0
    for fields in CASES[kind][:2]:
        config = config_of(kind, fields)
        for name in config.fields.keys() - {"model_type"}:
            rest = {other: value for other, value in config.fields.items() if other != name}
            try:
                counted = weights(Config(config.name, rest))
                completed = saved(kind, rest)
            except (ValueError, ZeroDivisionError, StrictDataclassError):  # The last two are transformers' refusals.
                continue
            assert counted == weights(Config(config.name, completed)), name
            taken += 1
    assert taken


@pytest.mark.parametrize(
    "name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
)
def test_sizes_that_define_a_model_are_required(name: str):
    fields = {other: value for other, value in config_of("qwen3", {}).fields.items() if other != name}
    refused(lambda: weights(Config("tiny", fields)), f"tiny has no {name} in its config")


@st.composite
def sizes(draw: st.DrawFn) -> Fields:
    """Of a model whose heads together need not be as wide as it is."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    small = st.integers(1, 40)
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "hidden_size": kv_heads * group * draw(st.integers(1, 6)) * 2,
        "head_dim": 2 * draw(st.integers(1, 9)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "vocab_size": draw(st.integers(4, 90)),
        "intermediate_size": draw(small),
        "moe_intermediate_size": draw(small),
        "shared_expert_intermediate_size": draw(small),
        "num_experts": draw(st.integers(3, 9)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
    }


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("llama", {}), ("gemma3_text", {}), ("qwen3_next", QWEN_MOE | DELTA_NET), ("glm4", {}), ("bamba", MAMBA2)],
)
@given(drawn=sizes())
@settings(max_examples=25)
def test_counts_are_those_of_models_of_any_size(kind: str, fields: Fields, drawn: Fields):
    if kind == "bamba":
        drawn |= {"mamba_n_heads": drawn["num_attention_heads"], "mamba_d_head": "auto"}
    config = config_of(kind, fields | drawn)
    assert weights(config) == sorted_out(model_of(config))


MIXTURES = [
    pytest.param(kind, CASES[kind][0], id=kind)
    for kind in CASES
    if CASES[kind][0].keys() & {"num_experts", "num_local_experts", "n_routed_experts"} and kind != "nemotron_h"
] + [pytest.param("nemotron_h", CASES["nemotron_h"][1], id="nemotron_h")]


@pytest.mark.parametrize(("kind", "fields"), MIXTURES)
def test_a_token_uses_as_many_experts_as_it_is_sent_to(kind: str, fields: Fields):
    (name,) = fields.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
    config, fewer = config_of(kind, fields), config_of(kind, fields | {name: fields["num_experts_per_tok"]})
    assert 0 < weights(fewer).experts < weights(config).experts
    assert active(config) == weights(config).total - weights(config).experts + weights(fewer).experts
    assert active(fewer) == weights(fewer).total


def test_without_experts_every_parameter_is_active():
    config = config_of("llama", {})
    assert active(config) == weights(config).total


def test_more_experts_for_a_token_than_there_are_is_refused():
    fields = config_of("mixtral", LOCAL_MOE).fields
    refused(
        lambda: active(Config("tiny", {**fields, "num_experts_per_tok": 8})),
        "tiny sends each token to 8 of 7 experts in its config",
    )


def test_an_unknown_family_is_refused_with_near_names():
    refused(
        lambda: weights(Config("tiny", {"model_type": "qwen4"})),
        "In the config of tiny: There is no model_type called 'qwen4'; did you mean",
    )


@pytest.mark.parametrize("factor", [True, "1", 0, -1.0, float("nan"), 1e300, None])
def test_an_invalid_multiplier_is_refused(factor: object):
    fields = config_of("lfm2", {}).fields
    refused(
        lambda: weights(Config("tiny", {**fields, "block_ffn_dim_multiplier": factor})),
        "tiny has an invalid block_ffn_dim_multiplier",
    )


def test_weights_add_up_and_multiply():
    counts = Weights(embedding=1, head=2, linear=3, experts=4, other=5)
    assert counts + counts == counts * 2
    assert (counts * 2).total == 30
