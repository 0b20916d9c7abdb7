"""The settings of a GGUF file as a config of transformers: each is used, or refused by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose, log, pi
from typing import Any

import torch
import transformers
from torch import Tensor

from kvprobe.checks import is_list
from kvprobe.errors import UserError
from kvprobe.models.gguf_header import Header
from kvprobe.models.gguf_tokens import special_ids

# Any, because its annotations are incomplete.
_TRANSFORMERS: Any = transformers

_REQUIRED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings that every file has, and the names that transformers has for them."""

_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

ROPE = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors by which rotary frequencies are divided: at all lengths; beyond the original one; and up to it."""


@dataclass(frozen=True)
class _Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        model_type: its name in transformers.
        optional: settings that its files may have, beside the usual ones.
        fixed: settings of transformers that it implies.
        large: number of layers of the model whose scores are scaled by another width than its heads' (Gemma).
    """

    model_type: str
    optional: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    large: int | None = None


_ARCHITECTURES = {
    "llama": _Architecture("llama"),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "qwen2moe": _Architecture("qwen2_moe", _EXPERTS | _SHARED),
    "qwen3moe": _Architecture("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "gemma2": _Architecture("gemma2", _WINDOW | _SOFTCAPS, large=46),
    "gemma3": _Architecture("gemma3_text", _WINDOW, large=62),
    "phi3": _Architecture("phi3", _WINDOW),
    "gpt2": _Architecture("gpt2"),
}


def config_of(header: Header) -> Any:
    """The config of transformers that says what the metadata say.

    Raises:
        UserError: they say what kvprobe cannot follow, or not enough.
    """
    name, kind = (header.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if not isinstance(name, str) or name not in _ARCHITECTURES or kind not in (None, "model"):
        raise UserError(
            f"{header.path.name} is a {str(kind or 'model')[:40]} of architecture {str(name)[:40]}; of GGUF files "
            f"kvprobe reads models of {', '.join(_ARCHITECTURES)}, so give the model's folder of safetensors instead."
        )
    architecture = _ARCHITECTURES[name]
    given: dict[str, Any] = {
        key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")
    }
    required, optional = dict(_REQUIRED), _OPTIONAL | dict(architecture.optional)
    if name == "gpt2":
        del required["attention.layer_norm_rms_epsilon"]
        required |= {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"}
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path.name} has no token_embd.weight; fetch it again, with all its parts.")
    if missing := next((key for key in required if key not in given), None):
        raise UserError(f"{header.path.name} does not say its {name}.{missing}; fetch it again.")
    settings = dict(architecture.fixed)
    settings |= {ours: _alike(given.pop(key)) for key, ours in (required | optional).items() if key in given}
    layers = {int(number[1]) for key in header.tensors if (number := re.match(r"blk\.(\d{1,9})\.", key))}
    if layers != set(range(len(layers))) or settings["num_hidden_layers"] != len(layers):
        raise UserError(
            f"{header.path.name} says {name}.block_count={settings['num_hidden_layers']!r:.40}, but has the tensors of "
            f"{len(layers)} blocks; fetch it again, with all its parts."
        )
    per_head = settings["hidden_size"] // settings["num_attention_heads"]
    d_head = settings.get("head_dim", per_head)
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    settings.setdefault("vocab_size", header.tensors["token_embd.weight"].shape[0])
    settings["tie_word_embeddings"] = "output.weight" not in header.tensors
    settings |= {f"{word}_token_id": number for word, number in special_ids(header).items()}
    scaled_by = per_head if len(layers) == architecture.large else d_head
    if architecture.large:
        settings["query_pre_attn_scalar"] = scaled_by
    if name == "gemma3":
        pattern = given.pop("attention.sliding_window_pattern", 6)
        slides: list[Any] = pattern if is_list(pattern) else [(layer + 1) % pattern > 0 for layer in range(len(layers))]
        settings["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    rotary = given.get("rope.dimension_count", d_head)
    if name != "gpt2":
        settings["rope_parameters"] = _rope(header, given, settings["max_position_embeddings"], rotary // 2)
    if name == "phi3" and rotary != d_head:
        settings["rope_parameters"]["partial_rotary_factor"] = rotary / d_head
    if name == "phi3" and "original_max_position_embeddings" in settings["rope_parameters"]:
        settings["original_max_position_embeddings"] = settings["rope_parameters"]["original_max_position_embeddings"]
    _refuse_others(
        header,
        given,
        {
            "attention.value_length": d_head,
            "attention.scale": scaled_by**-0.5,
            "attention.causal": True,
            "rope.dimension_count": rotary if name == "phi3" else d_head,
            "expert_count": 0,
            "expert_used_count": 0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": "norm_topk_prob" in settings,
            "expert_gating_func": 1,
            "tensor_data_layout": "Meta AI original pth",
        },
    )
    return _TRANSFORMERS.AutoConfig.for_model(architecture.model_type, **settings)


def _rope(header: Header, given: dict[str, Any], context: int, count: int) -> dict[str, Any]:
    """The rotary frequencies of a model, of which `count` are used; settings that it uses leave `given`."""
    name, theta = header.metadata["general.architecture"], given.pop("rope.freq_base", 10_000.0)
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, factor = given.get("rope.scaling.type"), given.get("rope.scaling.factor", given.get("rope.scale_linear"))
    original = given.get("rope.scaling.original_context_length", context)
    given.pop("rope.scaling.finetuned", None)
    tensors = {key: header.floats(key).flatten() for key in ROPE if key in header.tensors}
    if tensors:
        scaled: dict[str, Any] = {}
        if tensors.keys() == {ROPE[0]} and len(tensors[ROPE[0]]) == count:
            scaled = _llama3(tensors[ROPE[0]].double(), theta)
        elif tensors.keys() == {*ROPE[1:]} and {len(factors) for factors in tensors.values()} == {count}:
            long, short = (list(map(float, tensors[key])) for key in ROPE[1:])
            scaled = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
            scaled |= {"original_max_position_embeddings": original}
            scaled |= {"attention_factor": given.pop("rope.scaling.attn_factor", 1.0)}
            if kind == "longrope":
                del given["rope.scaling.type"]
        if name == "gemma3" or not scaled:
            raise UserError(
                f"{header.path.name} has the tensors {', '.join(tensors)}, which kvprobe cannot use in this model of "
                f"architecture {name}; give the model's folder of safetensors instead."
            )
        settings |= scaled
    elif kind == "yarn" and factor:
        del given["rope.scaling.type"], given["rope.scaling.factor"]
        settings |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        settings |= {f"beta_{end}": given.pop(f"rope.scaling.yarn_beta_{end}", usual) for end, usual in _BETAS.items()}
        if (more := given.pop("rope.scaling.attn_factor", 1.0)) != 1:
            settings["attention_factor"] = more * (1 + log(factor) / 10)
    elif kind in (None, "linear"):
        for key in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"):
            given.pop(key, None)
        settings |= {"rope_type": "linear", "factor": factor} if factor not in (None, 0, 1) else {}
    given.pop("rope.scaling.original_context_length", None)  # says nothing where nothing is scaled
    if name == "gemma3":
        near = {"rope_type": "default", "rope_theta": given.pop("rope.freq_base_swa", 10_000.0)}
        return {"full_attention": settings, "sliding_attention": near}
    return settings


def _llama3(factors: Tensor, theta: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling that give these factors; empty if none does.

    Waves up to `original / high` long are kept and those from `original / low` on are stretched by the largest factor;
    between these ends, how much of a wave is kept rises linearly with its frequency. Only ratios of the three numbers
    matter, so that low is 1.
    """
    frequencies = theta ** (-torch.arange(len(factors), dtype=torch.float64) / len(factors)) / (2 * pi)
    largest = round(float(factors.max()), 4)
    if largest <= 1:
        return {"rope_type": "default"} if bool((factors == 1).all()) else {}
    kept = (largest / factors - 1) / (largest - 1)
    between = ((kept > 1e-6) & (kept < 1 - 1e-6)).nonzero().flatten()
    original, high = 1 / float(frequencies[kept < 1e-6].max()) if bool((kept < 1e-6).any()) else 0.0, 4.0
    if len(between) > 1:
        ends = between[[0, -1]]
        slope = float(kept[ends].diff() / frequencies[ends].diff())
        original = slope / (slope * float(frequencies[ends[0]]) - float(kept[ends[0]]))
        high = 1 + original / slope
    elif len(between):
        original = float((1 + 3 * kept[between[0]]) / frequencies[between[0]])
    elif bool((kept > 0.5).any()):
        high = original * float(frequencies[kept > 0.5].min())
    settings = {"factor": largest, "low_freq_factor": 1.0, "high_freq_factor": round(high, 4)}
    settings |= {"original_max_position_embeddings": round(original)}
    again = ((round(original) * frequencies - 1) / (round(high, 4) - 1)).clamp(0, 1)
    return {"rope_type": "llama3", **settings} if torch.allclose(again, kept, rtol=0, atol=1e-4) else {}


_BETAS = {"fast": 32.0, "slow": 1.0}


def _refuse_others(header: Header, given: Mapping[str, Any], implied: Mapping[str, Any]) -> None:
    """Refuse settings that are not used and say something else than what is implied anyway."""
    name = header.metadata["general.architecture"]
    implied = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 0.0,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
        "rope.scaling.yarn_attn_factor": 1.0,
        **implied,
    }
    for key, value in given.items():
        said = implied.get(key)
        if value != said and not (
            isinstance(value, float) and type(said) is float and isclose(value, said, rel_tol=1e-6)
        ):
            raise UserError(
                f"{header.path.name} says {name}.{key}={value!r:.60}, which kvprobe cannot follow in this model; give "
                "the model's folder of safetensors instead."
            )
    known = {*_REQUIRED, *_OPTIONAL, *_WINDOW, *_SOFTCAPS, *_EXPERTS, *_SHARED, *implied, "rope.freq_base"}
    for key in header.metadata:
        prefix, _, rest = key.partition(".")
        if prefix != name and rest in known:
            raise UserError(f"{header.path.name} says {key[:60]}, but its architecture is {name}; fetch it again.")


def _alike(value: Any) -> Any:
    """A setting that may be given layer by layer."""
    if not is_list(value):
        return value
    if any(other != value[0] for other in value):
        raise ValueError("its layers differ in size")
    return value[0]
