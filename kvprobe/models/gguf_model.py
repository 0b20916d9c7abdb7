"""A GGUF file as a folder of transformers: each of its tensors and settings is used, or refused by name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.models.files import bounded
from kvprobe.models.gguf_config import ROPE, alike, config_of
from kvprobe.models.gguf_header import Header
from kvprobe.models.gguf_tokens import end_ids, tokenizer_of
from kvprobe.names import one_line

# Any, because its annotations are incomplete.
_TRANSFORMERS: Any = transformers

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_NORMED_HEADS = {
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
}
_GEMMA = {
    "blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_PACKED = "model.layers.{}.mlp.experts.gate_up_proj"
_EXPERTS = {
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": _PACKED,
    "blk.{}.ffn_up_exps": _PACKED,
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}
_PHI3 = {
    "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}

_BY_ARCHITECTURE = {
    "llama": _TENSORS,
    "qwen2": _TENSORS,
    "qwen3": _TENSORS | _NORMED_HEADS,
    "qwen2moe": _TENSORS | _EXPERTS | _SHARED_EXPERT,
    "qwen3moe": _TENSORS | _EXPERTS | _NORMED_HEADS,
    "gemma2": _TENSORS | _GEMMA,
    "gemma3": _TENSORS | _GEMMA | _NORMED_HEADS,
    "phi3": _TENSORS | _PHI3,
    "gpt2": _GPT2,
}


def write_folder(header: Header, folder: Path) -> None:
    """Write config, float32 weights and tokenizer of a GGUF file as a folder of transformers, proved whole.

    Raises:
        UserError: the file has what kvprobe cannot follow, or lacks what its model needs.
    """
    try:
        config = config_of(header)
        with torch.device("meta"), bounded([tensor.numbers for tensor in header.tensors.values()]):
            model = _TRANSFORMERS.AutoModelForCausalLM.from_config(config)
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        if config.tie_word_embeddings:
            del expected["lm_head.weight"]
        weights = _weights(header, expected)
    except UserError:
        raise
    except Exception as error:  # settings of untrusted files may be anything
        raise UserError(
            f"The settings of {header.path.name} do not describe the model that it holds ({one_line(error)}); fetch it "
            "again."
        ) from error
    tokenizer = tokenizer_of(header)
    generation = _TRANSFORMERS.GenerationConfig.from_model_config(config)
    generation.eos_token_id = end_ids(header)
    folder.mkdir()
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    for part in (config, generation, tokenizer):
        if part is not None:
            part.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _weights(header: Header, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The weights by their names in transformers, in the shapes that are expected."""
    name = str(header.metadata["general.architecture"])
    sources: dict[str, list[str]] = {}
    for key in header.tensors:
        if key in ROPE and name != "gpt2":
            continue  # used by the config
        stem, _, end = re.sub(r"^blk\.\d+", "blk.{}", key).rpartition(".")
        target = _BY_ARCHITECTURE[name].get(stem, "").format(*re.findall(r"^blk\.(\d+)", key))
        target += "" if ".experts." in target else f".{end}"
        if target not in expected:
            raise UserError(
                f"{header.path.name} has the tensor {key[:60]!r}, which kvprobe cannot use in this model of "
                f"architecture {name}; give the model's folder of safetensors instead."
            )
        sources.setdefault(target, []).append(key)
    if missing := sorted(expected.keys() - sources.keys()):
        raise UserError(
            f"{header.path.name} lacks {len(missing)} tensors that its model needs ({', '.join(missing[:3])} …); fetch "
            "it again, with all its parts."
        )
    weights: dict[str, Tensor] = {}
    for target, keys in sources.items():
        pieces = [_as_kept(header, key) for key in sorted(keys)]  # gates of experts stand before what they gate
        weight = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
        if tuple(weight.shape) != expected[target]:
            raise UserError(
                f"The tensor {keys[0]!r} of {header.path.name} is of shape {tuple(weight.shape)}, but its settings ask "
                f"for {expected[target]}; fetch it again."
            )
        weights[target] = weight.contiguous()
    return weights


def _as_kept(header: Header, key: str) -> Tensor:
    """A tensor as transformers keeps it."""
    weight, name = header.floats(key), header.metadata["general.architecture"]
    if name == "llama" and re.search(r"\.attn_[qk]\.", key):
        # llama.cpp rotates neighbouring dimensions, transformers those half a head apart.
        heads = alike(header.metadata["llama.attention.head_count"])
        if ".attn_k." in key:
            heads = alike(header.metadata.get("llama.attention.head_count_kv", heads))
        return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if name in ("gemma2", "gemma3") and key.endswith("norm.weight"):
        return weight - 1
    if key.endswith("ffn_gate_inp_shexp.weight"):
        return weight.reshape(1, -1)
    return weight.T if name == "gpt2" and weight.ndim == 2 and key.startswith("blk.") else weight
