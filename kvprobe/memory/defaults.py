"""Values of fields that configs leave out, as in the configuration classes of transformers; a test compares the two."""

from collections.abc import Mapping


def defaults_of(kind: str) -> Mapping[str, object]:
    """The values of missing fields in the class of this family, for the fields that kvprobe reads."""
    return _DEFAULTS.get(kind, {})


_DEFAULTS: dict[str, dict[str, object]] = {
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096, "tie_word_embeddings": True},
    "deepseek_v2": {"q_lora_rank": 1536, "first_k_dense_replace": 0},
    "deepseek_v3": {"q_lora_rank": 1536, "first_k_dense_replace": 3},
    "deepseek_v32": {"q_lora_rank": 1536, "first_k_dense_replace": 3},
    "exaone4": {"sliding_window": 4096},
    "falcon": {"multi_query": True, "parallel_attn": True, "tie_word_embeddings": True},
    "falcon_h1": {"mamba_d_ssm": 1024},
    "falcon_mamba": {"tie_word_embeddings": True},
    "gemma": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 4096, "head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gemma3n_text": {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "glm": {"head_dim": 128, "attention_bias": True},
    "glm4": {"head_dim": 128, "attention_bias": True},
    "gpt2": {"tie_word_embeddings": True},
    "gpt_bigcode": {"multi_query": True, "tie_word_embeddings": True},
    "gpt_neox": {"attention_bias": True},
    "gpt_oss": {"sliding_window": 128, "head_dim": 64, "attention_bias": True},
    "lfm2": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "tie_word_embeddings": True},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "mamba": {"tie_word_embeddings": True},
    "ministral3": {"head_dim": 128},
    "mistral": {"sliding_window": 4096},
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    "nemotron_h": {"head_dim": 128},
    "olmo3": {"sliding_window": 4096},
    "qwen2": {"sliding_window": 4096},
    "qwen2_moe": {"sliding_window": 4096, "qkv_bias": True},
    "qwen3": {"sliding_window": 4096, "head_dim": 128},
    "qwen3_5_text": {"head_dim": 256},
    "qwen3_moe": {"sliding_window": 4096},
    "qwen3_next": {"head_dim": 256},
    "seed_oss": {"head_dim": 128, "attention_bias": True},
    "smollm3": {"tie_word_embeddings": True},
    "starcoder2": {"use_bias": True, "tie_word_embeddings": True},
}
