"""Writes tiny models as GGUF files, the way llama.cpp's converter does; names of tensors are those of its library."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch

from kvprobe.inference.model import Model

_TYPES = {
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def write_gguf(
    model: Model,
    path: Path,
    quantisation: gguf.GGMLQuantizationType | None = None,
    *,
    without: Collection[str] = (),
    extra: Mapping[str, torch.Tensor] | None = None,
    split: int = 0,
    **changes: Any,
) -> Path:
    """The weights and tokenizer of a model, in float32 or quantised.

    Args:
        without: tensors to leave out.
        extra: tensors to add.
        split: at most so many tensors in a file.
        changes: metadata to add or replace, with `__` for dots; None takes one away. `arch` is the architecture.
    """
    config = model.lanes.plain.config
    architecture = _TYPES.get(config.model_type, config.model_type)
    metadata = _settings(config, architecture) | _vocabulary(model.tokenizer)
    for key, value in changes.items():
        metadata[key.replace("__", ".").replace("arch.", f"{architecture}.")] = value
    writer = gguf.GGUFWriter(str(path), metadata.pop("general.architecture", architecture), split_max_tensors=split)
    for key, value in metadata.items():
        if value is not None:
            of = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, _kind(value) if of is None else gguf.GGUFValueType.ARRAY, of)
    for name, tensor in (_stored(model, architecture) | dict(extra or {})).items():
        if name in without:
            continue
        array = tensor.contiguous().numpy()
        if quantisation is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)


def _settings(config: Any, architecture: str) -> dict[str, Any]:
    metadata = {
        f"{architecture}.{key}": value
        for key, name in _SETTINGS.items()
        if (value := getattr(config, name, None)) is not None
    }
    if architecture == "gpt2":
        metadata["gpt2.feed_forward_length"] = config.n_inner
        return metadata
    rope: dict[str, Any] = config.rope_parameters
    metadata[f"{architecture}.rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
    if getattr(config, "sliding_window", None) and architecture in ("gemma2", "gemma3", "phi3"):
        metadata[f"{architecture}.attention.sliding_window"] = config.sliding_window
    return metadata


def _vocabulary(tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    entries = sorted(core["vocab"], key=core["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": entries,
        "tokenizer.ggml.token_type": [3 if entry in tokenizer.all_special_tokens else 1 for entry in entries],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in core["merges"]],
        "tokenizer.ggml.bos_token_id": entries.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": entries.index("<|im_end|>"),
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def _stored(model: Model, architecture: str) -> dict[str, torch.Tensor]:
    """The tensors by llama.cpp's names, as its converter stores them."""
    config = model.lanes.plain.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.lanes.plain.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("gate_up_proj") and tensor.ndim == 3:
            layer = re.findall(r"\d+", name)[0]
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = half
            continue
        stem, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        tensors[f"{names.get_name(stem)}.{end}"] = _changed(name, tensor, architecture, config)
    return tensors


def _changed(name: str, tensor: torch.Tensor, architecture: str, config: Any) -> torch.Tensor:
    if architecture == "llama" and re.search(r"[qk]_proj", name):
        # llama.cpp rotates neighbouring dimensions, transformers those half a head apart.
        halves = tensor.reshape(-1, 2, config.head_dim // 2, tensor.shape[1])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return tensor.T
    return tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor
