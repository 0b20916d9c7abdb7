"""What a model stores and how many weights it has, from transformers' own classes: built of its config without weights
(on torch's meta device), it reads one token into transformers' own cache.

No code of a hub runs: a family is one that transformers itself has.
"""

import inspect
import json
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.integrations import hub_kernels
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from kvprobe.cache.parts import PartSize
from kvprobe.errors import UserError
from kvprobe.memory.caches import AttentionStore, LayerStore, State
from kvprobe.memory.config import LARGEST, Config
from kvprobe.memory.forward import Kernel
from kvprobe.memory.weights import Weights
from kvprobe.models.geometry import kinds_of, sources_of
from kvprobe.models.hf_cache import CACHE, library_cache
from kvprobe.models.recurrent import Noted, known_modules, writes_noted
from kvprobe.names import one_line, unknown

_KERNELS: Any = hub_kernels  # its annotations are incomplete
MOST_LAYERS = 1000
MOST_MODULES = 30_000
"""More than any model has; a config that asks for more is refused before it is built."""
_CLASSES: dict[str, str] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mllama_text_model": "MllamaForCausalLM"}
FAMILIES = tuple(sorted(name for name in _CLASSES if name in CONFIG_MAPPING))
_NOT_BUILT = ("attn_implementation", "experts_implementation", "quantization_config", "auto_map", "model_type")
"""Fields that say nothing of sizes, and may say what code runs."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim",
)  # fmt: skip
"""What is at least 1 wherever there is one."""
_OUTER = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields of a model of text and images that hold for its text model too."""
_KNOWN = (
    DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer, DummyLayer,
    LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer,
)  # fmt: skip
_PLAIN = (bool, int, float, str, tuple, torch.dtype, partial)
_NO_SETTINGS = {*vars(nn.Module()), "layer_idx"}
"""What differs among modules that compute alike."""
_UNPACKED = re.compile(r"router|shared_expert_gate|altup\.")
"""Matrices that no format packs."""


@dataclass(frozen=True)
class Unloaded:
    """What a model of a config is.

    Attributes:
        config: all its fields, those that the file leaves out included.
        layers: what each stores.
        weights: how many there are.
        wide: those of them that stay in float32, by the dtype in which the model is loaded.
        kernel: of attention, by default.
        assumed: sizes that the file leaves out.
    """

    config: Config
    layers: tuple[LayerStore, ...]
    weights: Weights
    wide: Mapping[str, Weights]
    kernel: Kernel
    assumed: Mapping[str, object]


def text_model(config: Config) -> Config:
    """The config of the text model.

    Raises:
        UserError: the family is unknown, or has no cache.
    """
    kind = config.kind
    if "text_config" in config.fields:
        inner = config.within("text_config")
        if "model_type" not in inner.fields and kind in CONFIG_MAPPING:
            made: Any = CONFIG_MAPPING[kind]
            kind = made().get_text_config().model_type
        kind = str(inner.fields.get("model_type", kind))
        shared = {name: config.fields[name] for name in _OUTER if name in config.fields}
        config = Config(config.name, {**shared, **inner.fields, "model_type": kind})
    if kind not in FAMILIES:
        raise UserError(unknown("family in the memory budget", kind[:60], FAMILIES))
    if config.has("kv_sharing_modes"):
        raise UserError(
            f"{config.name} has kv_sharing_modes in its config, which budgets do not support; choose another model."
        )
    if config.fields.get("use_bidirectional_attention") not in (None, False, "vision"):  # of an image's tokens alone
        raise UserError(
            f"{config.name} has bidirectional attention (use_bidirectional_attention), so it has no KV cache; choose a "
            "causal model."
        )
    return config


HALF = torch.bfloat16


def unloaded(config: Config) -> Unloaded:
    """What transformers builds of a text model's config.

    Raises:
        UserError: transformers cannot build it of these fields, or its cache holds something else than K and V,
            latents and states.
    """
    return _unloaded(config.name, json.dumps(dict(config.fields), sort_keys=True, default=repr))


def _decoded(value: Any) -> Any:
    """What JSON says, with infinite numbers as transformers writes them."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(entry) for entry in value] if isinstance(value, list) else value


@lru_cache(64)
def _unloaded(name: str, document: str) -> Unloaded:
    config = Config(name, json.loads(document))
    made: Any = CONFIG_MAPPING[config.kind]
    fields = {name: value for name, value in config.fields.items() if name not in _NOT_BUILT and name[:1] != "_"}
    for field, value in fields.items():
        _check(config, made, field, value)
    build: Any = getattr(transformers, _CLASSES[config.kind])
    kernel: Kernel = "sdpa" if build._supports_sdpa else "eager"
    try:
        with torch.device("meta"), _at_most(MOST_MODULES):
            model = build._from_config(
                made(**_decoded(fields)),
                dtype=HALF,  # some parameters are float32 even so
                attn_implementation=kernel,
                experts_implementation="batched_mm",
            )
    except UserError:
        raise
    except Exception as error:  # each family checks its fields in its own way, or not at all
        raise UserError(
            f"transformers cannot build a {config.kind} of the config of {config.name} ({one_line(error)}); correct it."
        ) from error
    assumed = {
        name: getattr(model.config, name)
        for name in (*_SIZES[:5], "max_position_embeddings")
        if not {name, made.attribute_map.get(name, name)} & fields.keys() and hasattr(model.config, name)
    }
    complete = Config(config.name, model.config.to_dict())
    wide = {dtype: _weights(model, among=_wide(model, dtype)) for dtype in ("bfloat16", "float16")}
    return Unloaded(complete, _layers(config, model), _weights(model), wide, kernel, assumed)


def _check(config: Config, made: Any, name: str, value: object) -> None:
    """Refuse what is no size, and layers without end, before transformers computes with them."""
    usual = getattr(made, name, getattr(made, made.attribute_map.get(name, name), None))
    name_of_all = next((other for other, own in made.attribute_map.items() if own == name), name)
    if name_of_all in _SIZES and value is not None and not isinstance(value, list):
        size = config.size(name)
        if name_of_all == "num_hidden_layers" and size > MOST_LAYERS:
            raise UserError(f"{config.name} has {size:,} layers in its config; at most {MOST_LAYERS:,} are allowed.")
    elif isinstance(value, int) and ((isinstance(usual, int) and usual >= 0) or value > LARGEST):
        config.flag(name) if isinstance(value, bool) else config.size(name, low=0)


@contextmanager
def _at_most(count: int) -> Generator[None]:
    """While this lasts, no more modules than so many can be made, transformers gives no advice on speed, and it calls
    no fused kernel of another package, which could not run without numbers."""
    made, said, exporting = 0, logging.get_verbosity(), _KERNELS.is_torchdynamo_exporting

    def counting(*_: object) -> None:
        nonlocal made
        made += 1
        if made > count:
            raise UserError(f"A model of this config has more than {count:,} modules; give a config of a model.")

    handle = nn.modules.module.register_module_module_registration_hook(counting)
    logging.set_verbosity_error()
    _KERNELS.is_torchdynamo_exporting = lambda: True  # when it exports, it calls its own
    try:
        yield
    finally:
        handle.remove()
        logging.set_verbosity(said)
        _KERNELS.is_torchdynamo_exporting = exporting


def _wide(model: PreTrainedModel, dtype: str) -> set[str]:
    """The parameters that transformers keeps in float32 when it loads the model in half precision.

    Args:
        dtype: in which; bfloat16 or float16.
    """
    patterns = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == "float16":  # against overflow, which bfloat16 has not
        patterns |= {*(model._keep_in_fp32_modules or ())}
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)) or "(?!)")
    return {name for name, own in model.named_parameters() if own.dtype == torch.float32 or kept.search(name)}


def _weights(model: nn.Module, among: set[str] | None = None) -> Weights:
    """The parameters by what file formats do with them.

    Args:
        among: those of these names alone.
    """
    modules = dict(model.named_modules())
    sizes = dict.fromkeys(("embedding", "head", "linear", "experts", "other"), 0)
    for name, parameter in model.named_parameters():
        if among is not None and name not in among:
            continue
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, nn.Embedding):
            kind = "embedding"
        elif name == "lm_head.weight":
            kind = "head"
        elif ".experts." in name and parameter.ndim == 3:
            kind = "experts"
        elif isinstance(module, nn.Linear | Conv1D) and parameter.ndim == 2 and not _UNPACKED.search(name):
            kind = "linear"
        else:
            kind = "other"
        sizes[kind] += parameter.numel()
    return Weights(**sizes)


def _layers(of: Config, model: PreTrainedModel) -> tuple[LayerStore, ...]:
    """What each layer stores.

    Raises:
        UserError: the model cannot read a token, or its cache holds something else than K and V, latents and states.
    """
    fields = Config(of.name, model.config.to_dict())
    heads, kv_heads = (fields.optional_size(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and heads % kv_heads:
        raise UserError(
            f"{of.name} has {heads} query heads for {kv_heads} KV heads in its config; the number of KV heads "
            "(num_key_value_heads) must divide that of query heads."
        )
    try:
        config: Any = model.config.get_text_config()
        kinds = kinds_of(config, config.num_hidden_layers)
        past, given, alike = _one_token(model, config, kinds)
        own = len(kinds) - (getattr(config, "num_kv_shared_layers", 0) or 0)
        sources = sources_of(config, own)
    except Exception as error:  # a model may fail in any way at sizes that do not fit together
        raise UserError(
            f"A {of.kind} of the config of {of.name} cannot read a token into transformers' cache ({one_line(error)}); "
            "choose another model, or correct the config."
        ) from error
    crossing = getattr(config, "cross_attention_layers", None) or ()
    layers: list[LayerStore] = []
    for number, (layer, kind) in enumerate(zip(past.layers[:own], kinds[:own], strict=True)):
        known = type(layer) in _KNOWN and (kind != "sliding_attention" or getattr(layer, "is_sliding", False))
        store = LayerStore(_attention(layer, config, kind, number in crossing), _state(layer, config, given))
        if number in alike and store == LayerStore():
            store = layers[alike[number]]
        if not known or (store == LayerStore() and kind not in ("mlp", "moe")):
            raise UserError(
                f"Layer {number} of {of.name} ({kind}) stores nothing, or what kvprobe cannot count; choose a causal "
                "model with a KV cache."
            )
        layers.append(store)
    return (*layers, *(LayerStore(shares=source) for source in sources[own:]))


def _one_token(model: PreTrainedModel, config: Any, kinds: list[str]) -> tuple[Any, list[Noted], dict[int, int]]:
    """Transformers' cache after one token, what the kernels of recurrent layers were given, and the layers that did
    not run, each with the one before it that is alike."""
    past, ids = library_cache(config), torch.zeros(1, 1, dtype=torch.long, device="meta")
    takes = inspect.signature(model.forward).parameters
    for part in model.modules():  # they would look for padding among tokens that have no numbers
        if isinstance(part, PreTrainedModel):
            vars(part)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    beside: dict[str, Any] = {"cache_params" if "cache_params" in takes else CACHE: past}
    if "position_ids" in takes:
        beside["position_ids"] = ids
    if "cross_attention_states" in takes:
        beside["cross_attention_states"] = torch.zeros(1, 1, config.hidden_size, dtype=HALF, device="meta")
    alike = _skip_alike(model, kinds)
    in_half_precision(model)
    with torch.no_grad(), _at_most(MOST_MODULES), writes_noted(known_modules(model)) as given:
        model(input_ids=ids, use_cache=True, **beside)
    return past, given, alike


def in_half_precision(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its parameters in half precision, as loading gives it, so that its states show which have it."""
    wide = _wide(model, "bfloat16") if model.dtype == HALF else _wide(model.bfloat16(), "bfloat16")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in wide else HALF)
    return model


def _skip_alike(model: nn.Module, kinds: list[str]) -> dict[int, int]:
    """Let each layer that is built like one before it return what that returned, since their numbers alone differ.

    Returns:
        These layers, each with the one before it.
    """
    stacks = (part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == len(kinds))
    first: dict[Any, int] = {}
    returned: dict[int, Any] = {}
    alike: dict[int, int] = {}
    for number, (layer, kind) in enumerate(zip(next(stacks, ()), kinds, strict=False)):
        source = first.setdefault((kind, _built(layer)), number)
        if source == number:
            layer.register_forward_hook(lambda _, __, output, number=number: returned.update({number: output}))
        else:
            alike[number] = source
            vars(layer)["forward"] = lambda *_, source=source, **__: returned[source]
    return alike


def _built(module: nn.Module) -> tuple[Any, ...]:
    """What two modules share that compute alike, but for their weights."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (
        type(module),
        *((name, tensor.shape, tensor.dtype) for name, tensor in tensors),
        *(
            (name, repr(value) if isinstance(value, _PLAIN) else id(value))
            for name, value in vars(module).items()
            if name not in _NO_SETTINGS
        ),
        *((name, _built(part)) for name, part in module.named_children()),
    )


def _attention(layer: Any, config: Any, kind: str, crosses: bool) -> AttentionStore | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.numel()):
        return None
    index = getattr(layer, "indexer_keys", None)
    kv_heads = cached = keys.shape[1]
    if getattr(config, "new_decoder_architecture", False):  # Falcon repeats K and V before it stores them
        kv_heads = config.num_kv_heads
    return AttentionStore(
        config.num_attention_heads,
        kv_heads,
        keys.shape[3],
        values.shape[3],
        reach=getattr(layer, "sliding_window", None),
        chunked=kind == "chunked_attention",
        latent=cached == 1 and getattr(config, "kv_lora_rank", None) is not None,
        d_index=0 if index is None else index.shape[-1],
        crosses=crosses,
        copies=cached if cached != kv_heads else None,
    )


def _state(layer: Any, config: Any, given: list[Noted]) -> State | None:
    inputs = [part for part in getattr(layer, "conv_states", {}).values() if part is not None]
    states = [part for part in getattr(layer, "recurrent_states", {}).values() if part is not None]
    if not (inputs or states):
        return None
    noted = given.pop(0) if states and given else {}
    names = {"step": "gated delta net", "gain": "Mamba-2"}
    name = next((called for part, called in names.items() if part in noted), "Mamba" if states else "short convolution")
    sizes = {part: PartSize(part, tensor.shape[2], tensor.shape[3]) for part, tensor in noted.items()}
    if noted:
        sizes["decay"] = sizes["decay"]._replace(numbers=2 * sizes["decay"].numbers)
    return State(
        name,
        channels=sum(part.shape[1] for part in inputs),
        kernel=inputs[0].shape[2],
        recurrent=sum(part[0].numel() for part in states),
        writes=tuple(sizes.values()) if noted or not states else None,
        dtype=getattr(config, "mamba_ssm_cache_dtype", None) or getattr(config, "mamba_ssm_dtype", None),
        narrow=any(part.dtype == HALF for part in states),
        wide=any(part.dtype != HALF for part in inputs),
    )
