"""A GGUF file as a folder of transformers: each of its tensors and settings is used, or refused by name."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.files import filling
from kvprobe.models.files import bounded
from kvprobe.models.gguf_config import ROPE, config_of
from kvprobe.models.gguf_header import Header
from kvprobe.models.gguf_tokens import end_ids, tokenizer_of
from kvprobe.names import one_line

# Any, because the annotations of these libraries are incomplete.
_TRANSFORMERS: Any = transformers
_GGUF: Any = gguf


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
        weights = _weights(header, expected, config.num_hidden_layers)
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
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    with filling(folder) as made:
        for part in (config, generation, tokenizer):
            if part is not None:
                part.save_pretrained(made)
        save_file(weights, made / "model.safetensors", {"format": "pt"})


def _weights(header: Header, expected: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, Tensor]:
    """The weights by their names in transformers, in the shapes that are expected."""
    name = str(header.metadata["general.architecture"])
    targets = _targets(expected, name, layers)
    sources: dict[str, list[str]] = {}
    for key in header.tensors:
        if key in ROPE and name != "gpt2":
            continue  # used by the config
        if (target := targets.get(key)) is None:
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


def _targets(expected: Iterable[str], architecture: str, layers: int) -> dict[str, str]:
    """By the names of llama.cpp, of which some tensors in transformers have two, those that are expected."""
    known = next(number for number, name in _GGUF.MODEL_ARCH_NAMES.items() if name == architecture)
    names = _GGUF.get_tensor_name_map(known, layers)
    targets: dict[str, str] = {}
    for target in expected:
        packed = target.endswith(".experts.gate_up_proj")
        for part in [target.replace("gate_up", half) for half in ("gate", "up")] if packed else [target]:
            key: str = names.get_name(part, (".weight", ".bias")) or part.replace("lm_head", "output")
            targets[key if key.endswith((".weight", ".bias")) else f"{key}.weight"] = target
    return targets


def _as_kept(header: Header, key: str) -> Tensor:
    """A tensor as transformers keeps it."""
    weight, name = header.floats(key), header.metadata["general.architecture"]
    if name == "llama" and re.search(r"\.attn_[qk]\.", key):
        # llama.cpp rotates neighbouring dimensions, transformers those half a head apart.
        heads: Any = header.metadata["llama.attention.head_count"]
        if ".attn_k." in key:
            heads = header.metadata.get("llama.attention.head_count_kv", heads)
        return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if name in ("gemma2", "gemma3") and key.endswith("norm.weight"):
        return weight - 1
    if key.endswith("ffn_gate_inp_shexp.weight"):
        return weight.reshape(1, -1)
    return weight.T if name == "gpt2" and weight.ndim == 2 and key.startswith("blk.") else weight
