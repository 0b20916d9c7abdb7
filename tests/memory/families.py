"""Tiny random models of many families; all sizes differ, so that no mix-up goes unnoticed."""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, MllamaForCausalLM

from kvprobe.memory.caches import LayerStore
from kvprobe.memory.config import Config
from kvprobe.memory.unloaded import text_model, unloaded

_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
_MIXTURE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 3,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, half sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 24}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "head_dim": 16}),
    "qwen3_moe, sliding": ("qwen3_moe", {**_MIXTURE, "use_sliding_window": True, "sliding_window": 6}),
    "qwen3_next": ("qwen3_next", {**_MIXTURE, **_DELTA, "shared_expert_intermediate_size": 24}),
    "qwen3_5_text": ("qwen3_5_text", _DELTA),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 5}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7}),
    "gemma3n_text": ("gemma3n_text", {
        "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 10, "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4,
    }),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral, full": ("mistral", {"sliding_window": None}),
    "mistral, window of 1": ("mistral", {"sliding_window": 1}),
    "ministral3": ("ministral3", {"head_dim": 16}),
    "mixtral": ("mixtral", _EXPERTS),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 7}),
    "phimoe": ("phimoe", {**_EXPERTS, "sliding_window": 5}),
    "gpt2": ("gpt2", _GPT2),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "gpt_bigcode, many heads": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "gpt_neox": ("gpt_neox", {}),
    "falcon": ("falcon", {}),
    "falcon, many heads": ("falcon", {"multi_query": False}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "head_dim": 16, "sliding_window": 5}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 5}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("deepseek_v2", _LATENT),
    "deepseek_v3": ("deepseek_v3", _LATENT),
    "deepseek_v32": ("deepseek_v32", {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}),
    "mamba": ("mamba", {"state_size": 8, "conv_kernel": 3}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8, "conv_kernel": 4}),
    "mamba2": ("mamba2", {
        "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "conv_kernel": 3, "chunk_size": 8,
    }),
    "jamba": ("jamba", {
        "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_d_conv": 3,
        "mamba_dt_rank": 2,
    }),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 16}),
    "granitemoehybrid": ("granitemoehybrid", {
        **_MAMBA2, **_EXPERTS, "layer_types": ["mamba", "attention", "mamba", "attention"],
        "shared_intermediate_size": 16,
    }),
    "nemotron_h": ("nemotron_h", {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 3,
        "chunk_size": 8, "head_dim": 8, "hybrid_override_pattern": "M*-*",
    }),
    "lfm2": ("lfm2", {"full_attn_idxs": [1, 3], "conv_L_cache": 3, "block_multiple_of": 8}),
    "llama4_text": ("llama4_text", {
        "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 5,
    }),
    "mllama_text_model": ("mllama_text_model", {"cross_attention_layers": [1, 3]}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 5, "sliding_window_pattern": 3}),
    "smollm3": ("smollm3", {}),
    "smollm3, sliding": ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "stablelm": ("stablelm", {}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", _EXPERTS),
    "exaone4": ("exaone4", {"sliding_window": 5, "sliding_window_pattern": 4}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
}  # fmt: skip


@cache
def settings(name: str) -> dict[str, Any]:
    """The config of this tiny model with the fields that were chosen, without those that its class derives."""
    kind, overrides = TINY[name]
    return {"model_type": kind, **_BASE, **overrides}


@cache
def tiny(name: str) -> tuple[Any, tuple[LayerStore, ...]]:
    """The model, and what the budget says its layers store, from the settings alone."""
    kind, overrides = TINY[name]
    config = AutoConfig.for_model(kind, **{**_BASE, **overrides})
    made = MllamaForCausalLM if kind == "mllama_text_model" else AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    model = made(config).eval()
    return model, unloaded(text_model(Config(name, settings(name)))).layers
