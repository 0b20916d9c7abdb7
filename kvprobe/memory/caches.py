"""What each layer of a model stores of the tokens that it has read, family by family."""

from dataclasses import dataclass

from kvprobe.cache.parts import INDEX, KV, LATENT, PartSize
from kvprobe.errors import UserError
from kvprobe.memory.config import Config
from kvprobe.memory.defaults import defaults_of
from kvprobe.memory.heads import d_head, heads, kv_heads, on
from kvprobe.memory.layer_types import KINDS, LayerType, layer_types, layers, window
from kvprobe.names import unknown


@dataclass(frozen=True)
class AttentionStore:
    """A layer that stores a key and a value per token and KV head.

    Attributes:
        heads: query heads.
        kv_heads: heads of K and V; 1 for latent attention.
        d_key, d_value: numbers in a key and in a value. In latent attention (MLA, DeepSeek-AI 2024, arXiv 2405.04434)
            those of the compressed latent and of the rotary part, which all heads share: there is no factor 2.
        reach: how many of the newest tokens are attended to, the query's own included; None for all.
        chunked: whether they are those of the query's chunk; else they are a sliding window.
        latent: whether it is latent attention.
        d_index: numbers in the key of a sparse-attention index (DeepSeek V3.2), which all heads share.
        crosses: whether the keys are those of another input, such as an image, whose length does not grow.
        copies: heads that transformers stores if it repeats K and V before it stores them; else None.
    """

    heads: int
    kv_heads: int
    d_key: int
    d_value: int
    reach: int | None = None
    chunked: bool = False
    latent: bool = False
    d_index: int = 0
    crosses: bool = False
    copies: int | None = None

    @property
    def numbers(self) -> int:
        """How many numbers are stored per token, in all heads."""
        return self.kv_heads * (self.d_key + self.d_value) + self.d_index

    @property
    def parts(self) -> tuple[PartSize, ...]:
        """What is stored of a token, as transformers stores it."""
        names, heads = LATENT if self.latent else KV, self.copies or self.kv_heads
        vectors = PartSize(names[0], heads, self.d_key), PartSize(names[1], heads, self.d_value)
        return (*vectors, PartSize(INDEX, 1, self.d_index)) if self.d_index else vectors

    def __str__(self) -> str:
        if self.latent:
            name = "MLA"
        elif self.kv_heads == self.heads:
            name = f"MHA {self.heads}"
        else:
            name = f"MQA {self.heads}:1" if self.kv_heads == 1 else f"GQA {self.heads}:{self.kv_heads}"
        reach = "" if self.reach is None else f", {'chunks of' if self.chunked else 'sliding'} {self.reach:,}"
        return f"{name}{reach}{', indexed' if self.d_index else ''}{', cross' if self.crosses else ''}"


STATE_BYTES = 4
"""Of a number in a recurrent state, which implementations store in float32."""


@dataclass(frozen=True)
class State:
    """A layer that stores a state of constant size.

    Attributes:
        name: of the mechanism.
        channels: of the causal convolution before it.
        kernel: width of that convolution.
        recurrent: numbers in the recurrent state; 0 for a convolution alone.
        writes: what kvprobe's caches keep of each token that was written to the state, besides the convolution's input;
            None where kvprobe does not read such layers.
        dtype: of the recurrent state, where the config names one.
    """

    name: str
    channels: int
    kernel: int
    recurrent: int
    writes: tuple[PartSize, ...] | None = None
    dtype: str | None = None

    @property
    def parts(self) -> tuple[PartSize, ...]:
        """What kvprobe's caches keep of a token; nothing where kvprobe does not read such layers."""
        return () if self.writes is None else (*self.writes, PartSize("conv", 1, self.channels))

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class LayerStore:
    """What one layer stores: for attention, for recurrence, for both, or nothing.

    Attributes:
        shares: the layer whose K and V it reads instead of storing its own (Gemma 3n).
    """

    attention: AttentionStore | None = None
    state: State | None = None
    shares: int | None = None

    @property
    def parts(self) -> tuple[PartSize, ...]:
        """What kvprobe's caches keep of each token, as `Geometry.layers` has it of a loaded model."""
        return tuple(part for store in (self.attention, self.state) if store is not None for part in store.parts)

    def __str__(self) -> str:
        parts = [str(part) for part in (self.attention, self.state) if part is not None]
        if self.shares is not None:
            return f"shared with layer {self.shares}"
        return " + ".join(parts) or "no attention"


_TEXT_KINDS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen3_5": "qwen3_5_text",
}
"""Families of models of text and images, and the families of the text models in them."""

_OUTER = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields of a model of text and images that hold for its text model too."""


def text_model(config: Config) -> Config:
    """The config of the text model, with the defaults of its family.

    Raises:
        UserError: the family is unknown, or sizes differ from layer to layer in an unknown way.
    """
    kind = config.kind
    if "text_config" in config.fields:
        inner = config.within("text_config")
        kind = str(inner.fields.get("model_type", _TEXT_KINDS.get(kind, kind)))
        shared = {name: config.fields[name] for name in _OUTER if name in config.fields}
        config = Config(config.name, {**shared, **inner.fields, "model_type": kind})
    if kind not in KINDS:
        # The formula of another family would give a wrong budget.
        raise UserError(unknown("family in the memory budget", kind[:60], sorted(KINDS)))
    for name in ("per_layer_config", "kv_sharing_modes"):
        if config.has(name):
            raise UserError(
                f"{config.name} has {name} in its config, so sizes change from layer to layer, which budgets do not "
                "support; choose another model."
            )
    if config.has("use_bidirectional_attention") and config.flag("use_bidirectional_attention"):
        raise UserError(
            f"{config.name} has bidirectional attention (use_bidirectional_attention), so it has no KV cache; choose a "
            "causal model."
        )
    return config.with_defaults(defaults_of(kind))


def layers_of(config: Config) -> tuple[LayerStore, ...]:
    """What each layer of a text model stores.

    Raises:
        UserError: a size is missing or impossible.
    """
    types = layer_types(config)
    if not types:
        raise UserError(f"{config.name} has no layers in its config; give at least one.")
    sharing = _sharing(config, types)
    alike = {kind: _layer(config, kind) for kind in dict.fromkeys(types)}
    return tuple(
        LayerStore(shares=sharing[number]) if number in sharing else alike[kind] for number, kind in enumerate(types)
    )


def _layer(config: Config, kind: LayerType) -> LayerStore:
    if kind == "none":
        return LayerStore()
    if kind in ("linear", "conv"):
        return LayerStore(state=_state(config, kind))
    if kind == "hybrid":
        return LayerStore(_attention(config, "full"), _state(config, "linear"))
    return LayerStore(_attention(config, kind))


def _attention(config: Config, kind: LayerType) -> AttentionStore:
    reach = {"sliding": window, "chunked": lambda config: config.size("attention_chunk_size")}.get(kind)
    if config.kind.startswith("deepseek"):
        return AttentionStore(
            heads(config),
            kv_heads=1,
            d_key=config.size("kv_lora_rank"),
            d_value=config.size("qk_rope_head_dim"),
            latent=True,
            d_index=config.size("index_head_dim") if kind == "indexed" else 0,
        )
    return AttentionStore(
        heads(config),
        kv_heads(config),
        d_head(config),
        d_head(config),
        reach=None if reach is None else reach(config),
        chunked=kind == "chunked",
        crosses=kind == "cross",
        # Falcon repeats K and V for each query head before it stores them.
        copies=heads(config) if config.kind == "falcon" and on(config, "new_decoder_architecture") else None,
    )


def _state(config: Config, kind: LayerType) -> State:
    if kind == "conv":
        return State("short convolution", config.size("hidden_size"), config.size("conv_L_cache"), 0, writes=())
    family = config.kind
    if family in ("qwen3_next", "qwen3_5_text"):
        d_key, d_value = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
        key_heads, value_heads = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
        return State(
            "gated delta net",
            channels=2 * key_heads * d_key + value_heads * d_value,
            kernel=config.size("linear_conv_kernel_dim"),
            recurrent=value_heads * d_key * d_value,
            writes=_writes((key_heads, d_key), (value_heads, d_value), "step"),
            dtype=_ssm_dtype(config),
        )
    if family in ("mamba", "falcon_mamba", "jamba"):
        inner = config.size("mamba_expand", "expand", default=2) * config.size("hidden_size")
        if family != "jamba":
            inner = config.size("intermediate_size", default=inner)
        return State(
            "Mamba",
            channels=inner,
            kernel=config.size("mamba_d_conv", "conv_kernel", default=4),
            recurrent=inner * config.size("mamba_d_state", "state_size", default=16),
        )
    count = config.size("mamba_n_heads", "mamba_num_heads", "num_heads")
    groups = config.size("mamba_n_groups", "n_groups")
    numbers = config.size("mamba_d_state", "ssm_state_size", "state_size")
    inner = _mamba2_width(config, count)
    return State(
        "Mamba-2",
        channels=inner + 2 * groups * numbers,
        kernel=config.size("mamba_d_conv", "conv_kernel", default=4),
        recurrent=inner * numbers,
        writes=_writes((groups, numbers), (count, inner // count), "gain"),
        dtype=_ssm_dtype(config),
    )


def _writes(key: tuple[int, int], value: tuple[int, int], amount: str) -> tuple[PartSize, ...]:
    """What a token writes, from heads and numbers of keys and values; `kvprobe.cache.parts.WRITES` explains it."""
    heads = value[0]
    return PartSize("key", *key), PartSize("value", *value), PartSize("decay", heads, 2), PartSize(amount, heads, 1)


def _mamba2_width(config: Config, count: int) -> int:
    if config.kind in ("nemotron_h", "mamba2"):
        return count * config.size("mamba_head_dim", "head_dim")
    if config.kind == "falcon_h1" and config.has("mamba_d_ssm"):
        return config.size("mamba_d_ssm")
    return config.size("mamba_expand", default=2) * config.size("hidden_size")


def _ssm_dtype(config: Config) -> str | None:
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        if config.has(name):
            return config.word(name)
    return "float32" if config.kind == "nemotron_h" else None


def _sharing(config: Config, types: list[LayerType]) -> dict[int, int]:
    """Layers that store nothing, and the earlier layer of the same type whose K and V they read."""
    if config.kind != "gemma3n_text":
        return {}
    first = layers(config) - config.size("num_kv_shared_layers", default=0, low=0)
    last = {kind: number for number, kind in enumerate(types[: max(first, 0)])}
    sharing = {}
    for layer in range(max(first, 0), layers(config)):
        if types[layer] not in last:
            raise UserError(
                f"{config.name} has no layer before {first} whose K and V layer {layer} could share in its config; "
                "lower num_kv_shared_layers."
            )
        sharing[layer] = last[types[layer]]
    return sharing
