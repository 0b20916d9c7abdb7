"""Writes a tiny Llama as a GGUF file, the way llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch

from kvprobe.inference.model import Model

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: Model, path: Path, quantisation: gguf.GGMLQuantizationType | None = None) -> Path:
    """The weights and tokenizer of a Llama, in float32 or quantised."""
    writer = gguf.GGUFWriter(str(path), "llama")
    _add_config(writer, model.lanes.plain.config)
    _add_tokenizer(writer, model.tokenizer)
    for name, tensor in model.lanes.plain.state_dict().items():
        array = _as_stored(name, tensor, model.geometry.d_head).contiguous().numpy()
        if quantisation is not None and array.ndim == 2:
            writer.add_tensor(_gguf_name(name), gguf.quantize(array, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(_gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    entries = sorted(core["vocab"], key=core["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(entries)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[entry in tokenizer.all_special_tokens] for entry in entries])
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_bos_token_id(entries.index("<|im_start|>"))
    writer.add_eos_token_id(entries.index("<|im_end|>"))
    writer.add_chat_template(tokenizer.chat_template)


def _gguf_name(name: str) -> str:
    *path, end = name.split(".")
    if path[:2] == ["model", "layers"]:
        return f"blk.{path[2]}.{_NAMES['.'.join(path[3:])]}.{end}"
    return f"{_NAMES['.'.join(path)]}.{end}"


def _as_stored(name: str, tensor: torch.Tensor, d_head: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions, transformers those half a head apart."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    halves = tensor.reshape(-1, 2, d_head // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)
