"""Which layers of a model attend to everything, which to a window, and which store a state instead, by family.

The rules are those of the configuration classes of transformers 5.23 and of its `get_layer_types_and_kwargs`; a test
compares them with the caches that the library makes.
"""

from collections.abc import Callable
from typing import Literal, get_args

from kvprobe.errors import UserError
from kvprobe.memory.config import Config
from kvprobe.names import unknown

LayerType = Literal["full", "sliding", "chunked", "indexed", "linear", "conv", "hybrid", "cross", "none"]
"""`linear`: a recurrent state (Mamba, gated delta net); `conv`: a short convolution; `hybrid`: full attention and a
recurrent state side by side; `cross`: attention to another input; `indexed`: full attention with an index of keys;
`none`: an MLP alone."""

MOST_LAYERS = 1000
"""A budget of so many layers still takes less than a second."""

_SPELLINGS: dict[str, LayerType] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "deepseek_sparse_attention": "indexed",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "conv",
    "hybrid": "hybrid",
    "moe": "none",
    "mlp": "none",
}

_LETTERS: dict[str, LayerType] = {"M": "linear", "*": "full", "-": "none", "E": "none"}
"""The letters of Nemotron-H's `hybrid_override_pattern`."""


def layer_types(config: Config) -> list[LayerType]:
    """The type of each layer.

    Raises:
        UserError: a type is unknown, or the list of types is not as long as there are layers.
    """
    rule = _RULES.get(config.kind, _by_window)
    for name in ("layer_types", "layers_block_type"):
        if config.has(name) and rule not in (_all_hybrid, _jamba, _bamba):
            names = config.items(name, None if rule is _nemotron else layers(config))
            return [_spelt(config, spelling) for spelling in names]
    return rule(config)


def layers(config: Config) -> int:
    """The number of layers.

    Raises:
        UserError: it is missing, or larger than in any model.
    """
    count = config.size("num_hidden_layers", "n_layer", "num_layers")
    if count > MOST_LAYERS:
        raise UserError(f"{config.name} has {count:,} layers in its config; at most {MOST_LAYERS:,} are allowed.")
    return count


def window(config: Config) -> int:
    """The window of the sliding layers in tokens, including the query's own."""
    return config.size("sliding_window")


def _spelt(config: Config, name: object) -> LayerType:
    if not isinstance(name, str) or name not in _SPELLINGS:
        raise UserError(f"In the config of {config.name}: {unknown('layer type', str(name)[:40], _SPELLINGS)}")
    return _SPELLINGS[name]


def _by_window(config: Config) -> list[LayerType]:
    return ["sliding" if config.optional_size("sliding_window") else "full"] * layers(config)


def _all(kind: LayerType) -> Callable[[Config], list[LayerType]]:
    return lambda config: [kind] * layers(config)


_full, _all_hybrid = _all("full"), _all("hybrid")


def _every(
    default: int, *, field: str = "sliding_window_pattern", others: LayerType = "sliding"
) -> Callable[[Config], list[LayerType]]:
    """Each n-th layer is full, the others are of another type."""

    def rule(config: Config) -> list[LayerType]:
        period = config.size(field, default=default)
        return [others if (layer + 1) % period else "full" for layer in range(layers(config))]

    return rule


def _exaone(config: Config) -> list[LayerType]:
    return (_every(4) if config.has("sliding_window") else _full)(config)


def _qwen(config: Config) -> list[LayerType]:
    """If layers slide, those from `max_window_layers` on do."""
    sliding = config.flag("use_sliding_window", default=False)
    first = config.size("max_window_layers", default=28, low=0) if sliding else layers(config)
    return ["sliding" if layer >= first else "full" for layer in range(layers(config))]


def _qwen_moe(config: Config) -> list[LayerType]:
    """If layers slide, every other one before `max_window_layers` does."""
    sliding = config.flag("use_sliding_window", default=False)
    last = config.size("max_window_layers", default=28, low=0) if sliding else 0
    return ["sliding" if (layer + 1) % 2 and layer < last else "full" for layer in range(layers(config))]


def _qwen3_moe(config: Config) -> list[LayerType]:
    return _by_window(config) if config.flag("use_sliding_window", default=False) else _full(config)


def _smollm3(config: Config) -> list[LayerType]:
    """If layers slide, those without rotary embedding do."""
    sliding = config.flag("use_sliding_window", default=False) and config.has("sliding_window")
    return ["sliding" if sliding and not rotary else "full" for rotary in _rotary(config)]


def _llama4(config: Config) -> list[LayerType]:
    """Layers with rotary embedding attend within chunks."""
    return ["chunked" if rotary else "full" for rotary in _rotary(config)]


def _rotary(config: Config) -> list[bool]:
    if config.has("no_rope_layers") and config.items("no_rope_layers"):
        return [bool(rotary) for rotary in config.items("no_rope_layers", layers(config))]
    interval = config.size("no_rope_layer_interval", default=4)
    return [bool((layer + 1) % interval) for layer in range(layers(config))]


def _jamba(config: Config) -> list[LayerType]:
    period = config.size("attn_layer_period", default=8)
    offset = config.size("attn_layer_offset", default=4, low=0)
    return ["full" if layer % period == offset else "linear" for layer in range(layers(config))]


def _bamba(config: Config) -> list[LayerType]:
    return _indices(config, "attn_layer_indices", "linear")


def _lfm(config: Config) -> list[LayerType]:
    return _indices(config, "full_attn_idxs", "conv") if config.has("full_attn_idxs") else _full(config)


def _mllama(config: Config) -> list[LayerType]:
    crossing = config.items("cross_attention_layers")
    return ["cross" if layer in crossing else "full" for layer in range(layers(config))]


def _indices(config: Config, name: str, others: LayerType) -> list[LayerType]:
    full = config.items(name) if config.has(name) else []
    return ["full" if layer in full else others for layer in range(layers(config))]


def _nemotron(config: Config) -> list[LayerType]:
    pattern = config.word("hybrid_override_pattern")
    for letter in pattern:
        if letter not in _LETTERS:
            raise UserError(f"In the config of {config.name}: {unknown('layer letter', letter, _LETTERS)}")
    return [_LETTERS[letter] for letter in pattern]


_RULES: dict[str, Callable[[Config], list[LayerType]]] = {
    **dict.fromkeys(
        (
            "llama", "gemma", "gpt2", "gptj", "gpt_neox", "gpt_bigcode", "falcon", "olmo", "olmo2", "olmoe", "phi",
            "stablelm", "cohere", "glm", "glm4", "granite", "granitemoe", "seed_oss", "deepseek_v2", "deepseek_v3",
        ),
        _full,
    ),
    **dict.fromkeys(("mistral", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2"), _by_window),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "granitemoehybrid"), _all("linear")),
    **dict.fromkeys(("qwen2", "qwen3"), _qwen),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), _every(4, field="full_attention_interval", others="linear")),
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _every(2, field="-"),
    "gemma3_text": _every(6),
    "gemma3n_text": _every(5, field="-"),
    "gpt_oss": _every(2, field="-"),
    "olmo3": _every(4, field="-"),
    "cohere2": _every(4),
    "exaone4": _exaone,
    "smollm3": _smollm3,
    "llama4_text": _llama4,
    "deepseek_v32": _all("indexed"),
    "jamba": _jamba,
    "bamba": _bamba,
    "falcon_h1": _all_hybrid,
    "nemotron_h": _nemotron,
    "lfm2": _lfm,
    "mllama_text_model": _mllama,
}  # fmt: skip

assert set(_SPELLINGS.values()) | {"cross"} == set(get_args(LayerType))

KINDS = frozenset(_RULES)
"""The families that kvprobe knows."""
