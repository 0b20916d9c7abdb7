"""Every causal language model of transformers, built tiny: its config's own fields, as small as it allows."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model type to the class that transformers loads for it."""

NEWER_LENS = version("transformer-lens") >= "4"
HOOKED_BY_4 = ("cohere", "cohere2", "hunyuan_v1_dense")
"""What TransformerLens 3.9 computes differently and 4 does not."""
NEWER_TRANSFORMERS = version("transformers") >= "5.24"
"""In which TransformerLens cannot run CodeGen."""

VOCABULARY = 64
WINDOW = 5
LAYERS = 4

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "sliding_window": WINDOW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # GPT-2 and its kin
    "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "n_inner": 48, "rotary_dim": 4, "n_ctx": 256,
    "dff": 48,
    # Decoders cut out of encoder-decoders, BERT and its kin
    "d_model": 32, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 256, "ffn_dim": 48, "decoder_layers": LAYERS,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "num_encoder_layers": 2, "num_decoder_layers": LAYERS, "embedding_size": 16,
    "word_embed_proj_dim": 32, "num_layers": LAYERS, "attention_head_size": 8, "is_decoder": True,
    # A sparse index that chooses fewer slots than there are, with so many heads that no two slots score alike
    "index_topk": 6, "index_n_heads": 32, "index_head_dim": 16,
    # Mixtures and latent attention
    "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_token": 2,
    "shared_expert_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 8,
    # State spaces
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 3,
    "mamba_expand": 2, "mamba_chunk_size": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    # Towers beside the text
    "image_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 32, "out_hidden_size": 32, "d_ff": 48,
}  # fmt: skip

_LATENT = {"num_key_value_heads": 4}
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW, "num_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16},
    "dots1": {"moe_intermediate_size": 24, "n_shared_experts": 1},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"] * 2, "axial_pos_embds": False,
                 "feed_forward_size": 48, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "modernbert-decoder": {"local_attention": WINDOW},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "git": {"vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                              "num_attention_heads": 4, "image_size": 16, "patch_size": 8}},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "prophetnet": {"num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "phi4_multimodal": {"vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                          "num_attention_heads": 4, "crop_size": 16, "image_size": 16, "patch_size": 8},
                        "audio_config": {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1,
                                         "num_attention_heads": 4}},
    "llama4_text": {"intermediate_size_mlp": 48, "attention_chunk_size": WINDOW},
    "llama4": {"intermediate_size_mlp": 48, "attention_chunk_size": WINDOW},
    "moshi": {"audio_vocab_size": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16},
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"),
                    _LATENT | {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_head_dim": 8,
                               "linear_num_heads": 4}),
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 8,
                     "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 1, "index_n_heads": 2, "index_head_dim": 8},
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
                     "longcat_flash", "minicpm3", "sarvam_mla", "youtu", "dots3_note_text"), _LATENT),
}  # fmt: skip


def tiny_config(kind: str) -> Any:
    """A small config of a model type.

    Raises:
        Exception: whatever its own checks raise, where it cannot be made small by its fields alone.
    """
    return _small(getattr(transformers, NAMES[kind]).config_class or CONFIG_MAPPING[kind], _OWN.get(kind, {}))


def tiny(kind: str, seed: int = 0, **changes: Any) -> Any:
    """The causal language model of a model type, with random weights of which none is trivial.

    Args:
        changes: to its config.
    """
    config = tiny_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, NAMES[kind])(config).eval()
        with torch.no_grad():
            # Libraries start norms at one, biases at zero and weights so small that attention hardly matters.
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(4)
    return model


def eager_attention(plain: Any, ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The attention weights of each layer that attends, as the model's own library computes them."""
    before = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return plain(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    finally:
        plain.set_attn_implementation(before)


def _small(kind: type[Any], overrides: dict[str, Any]) -> Any:
    """A config of a class, its sub-configs small too."""
    default = kind().to_dict()
    fields = {name: value for name, value in _SMALL.items() if name in default or name in kind.attribute_map}
    # A field by two names is given once, by its own.
    fields = {name: value for name, value in fields.items() if kind.attribute_map.get(name) not in fields}
    parts = {
        name: _small(part, overrides.get(name, {})).to_dict()
        for name, part in getattr(kind, "sub_configs", {}).items()
        if name in default and hasattr(part, "model_type") and name not in overrides
    }
    return kind(**{**fields, **parts, **overrides})
