"""The blocks of language models, and how many parameters each has."""

from collections.abc import Callable
from dataclasses import astuple, dataclass

from kvprobe.memory.config import Config
from kvprobe.memory.heads import Size, Switch, d_head, field, heads, kv_heads, on, width
from kvprobe.memory.layer_types import LayerType, layer_types, layers


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters by kind, since file formats store the kinds differently; they can be added and multiplied.

    Attributes:
        embedding: of tokens, of learned positions, and of tokens for each layer (Gemma 3n).
        head: the unembedding matrix; 0 if it is the embedding's.
        linear: matrices of attention, dense MLPs, shared experts and recurrent layers, which weight-only quantisation
            (GPTQ, AWQ, fp8) packs.
        experts: matrices of the experts that a router chooses among.
        other: norms, biases (experts' too), convolutions, routers and gates, decay rates, sinks, and the like.
    """

    embedding: int = 0
    head: int = 0
    linear: int = 0
    experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))

    def __add__(self, more: "Weights") -> "Weights":
        return Weights(*(one + another for one, another in zip(astuple(self), astuple(more), strict=True)))

    def __mul__(self, times: int) -> "Weights":
        return Weights(*(count * times for count in astuple(self)))


Block = Callable[[Config], Weights]
"""The parameters of a block in a model with this config."""


def in_layers(which: LayerType | Size, *blocks: Block) -> Block:
    """These blocks in each layer of a type, or in so many layers; if there are none, their fields are not read."""

    def block(config: Config) -> Weights:
        times = which(config) if callable(which) else layer_types(config).count(which)
        return sum((part(config) for part in blocks), Weights()) * times if times else Weights()

    return block


def decoder(*blocks: Block, norms: int | Size = 2, bias: bool = False) -> Block:
    """These blocks and so many norms in every layer, and a norm after the last layer; `bias` is that of the norms."""

    def block(config: Config) -> Weights:
        count = norms(config) if callable(norms) else norms
        layer = sum((part(config) for part in blocks), norm(width(config), bias) * count)
        return layer * layers(config) + norm(width(config), bias)

    return block


def in_sparse_layers(sparse: Size, mlp: Block, *blocks: Block) -> Block:
    """These blocks, such as a mixture of experts, in so many layers, and an MLP in the others."""
    in_sparse = in_layers(sparse, *blocks)
    in_dense = in_layers(lambda config: layers(config) - sparse(config), mlp)
    return lambda config: in_sparse(config) + in_dense(config)


def linear(inputs: int, outputs: int, bias: bool = False) -> Weights:
    """A matrix, and optionally a bias for each output."""
    return Weights(linear=inputs * outputs, other=outputs * bias)


def norm(width: int, bias: bool = False) -> Weights:
    """A scale for each coordinate; layer norms have a bias too."""
    return Weights(other=width * (1 + bias))


intermediate_size = field("intermediate_size")
"""The width inside an MLP."""


def experts(config: Config) -> int:
    """How many experts a router chooses among; 0 if there is none."""
    return config.size("num_experts", "num_local_experts", "n_routed_experts", low=0)


def attention(
    bias: Switch = False, out_bias: Switch | None = None, *, kv_heads: Size = kv_heads, gated: bool = False
) -> Block:
    """Projections to queries, keys and values, and back.

    Args:
        out_bias: of the projection back; by default `bias`.
        gated: with a gate for each query (Qwen3-Next).
    """

    def block(config: Config) -> Weights:
        queries, keys = heads(config) * d_head(config), kv_heads(config) * d_head(config)
        back = linear(queries, width(config), on(config, bias if out_bias is None else out_bias))
        return linear(width(config), queries * (1 + gated) + 2 * keys, on(config, bias)) + back

    return block


def head_norms(switch: Switch = True, *, bias: bool = False) -> Block:
    """Norms of queries and of keys, which all heads share."""
    return lambda config: norm(d_head(config), bias) * (2 * on(config, switch))


def qk_norms(switch: Switch = True) -> Block:
    """Norms of queries and of keys, with separate scales for each head."""
    return lambda config: norm((heads(config) + kv_heads(config)) * d_head(config)) * on(config, switch)


def latent_attention(config: Config) -> Weights:
    """Keys and values, and optionally queries, from a low-rank latent per token (DeepSeek-V2, arXiv:2405.04434)."""
    bias = on(config, "attention_bias")
    d_rope, d_nope, d_value = (config.size(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    rank, q_rank = config.size("kv_lora_rank"), config.optional_size("q_lora_rank")
    d_queries = heads(config) * (d_nope + d_rope)
    if q_rank is None:
        queries = linear(width(config), d_queries)
    else:
        queries = linear(width(config), q_rank, bias) + norm(q_rank) + linear(q_rank, d_queries)
    latent = linear(width(config), rank + d_rope, bias) + norm(rank)
    unpacked = linear(rank, heads(config) * (d_nope + d_value))
    return queries + latent + unpacked + linear(heads(config) * d_value, width(config), bias)


def indexer(config: Config) -> Weights:
    """The index of DeepSeek-V3.2's sparse attention: queries, one key for each token, and a weight for each head."""
    n_heads, d_index = config.size("index_n_heads"), config.size("index_head_dim")
    keys = linear(width(config), d_index) + norm(d_index, bias=True)
    return linear(config.size("q_lora_rank"), n_heads * d_index) + keys + linear(width(config), n_heads)


def gated_mlp(inner: Size = intermediate_size, bias: Switch = False) -> Block:
    """Gate, up and down."""
    return _mlp(2, inner, bias, width)


def plain_mlp(inner: Size = intermediate_size, bias: Switch = False, *, width: Size = width) -> Block:
    """Up and down."""
    return _mlp(1, inner, bias, width)


def _mlp(into: int, inner: Size, bias: Switch, width: Size) -> Block:
    def block(config: Config) -> Weights:
        up = linear(width(config), into * inner(config), on(config, bias))
        return up + linear(inner(config), width(config), on(config, bias))

    return block


def mixture(expert: Block, *, router_bias: bool = False) -> Block:
    """Experts, and a router with a row for each."""

    def block(config: Config) -> Weights:
        one = expert(config)
        return Weights(experts=one.linear, other=one.other + width(config) + router_bias) * experts(config)

    return block


def gate(config: Config) -> Weights:
    """A gate: one number from the residual stream."""
    return Weights(other=width(config))


def expanded(config: Config) -> int:
    """Channels of a Mamba layer."""
    return config.size("expand", "mamba_expand", default=2) * width(config)


def mamba1(channels: Size = expanded, *, normed: bool = False) -> Block:
    """A selective state space (Mamba, arXiv:2312.00752); `normed` if there are norms of what is selected (Jamba)."""

    def block(config: Config) -> Weights:
        inner, rank, states = channels(config), _time_step_rank(config), _states(config)
        bias = _mamba_bias(config)
        around = linear(width(config), 2 * inner, bias) + linear(inner, width(config), bias)
        selected = linear(inner, rank + 2 * states) + norm((rank + 2 * states) * normed)
        decays_and_skips = Weights(other=inner * (states + 1))
        return around + _convolution(config, inner) + selected + linear(rank, inner, bias=True) + decays_and_skips

    return block


def mamba2(channels: Size = expanded, *, normed: Switch = True, out_bias: Switch | None = None) -> Block:
    """A selective state space with a decay, a skip and a time step for each head (Mamba-2, arXiv:2405.21060).

    Args:
        out_bias: of the projection back; by default as that of the other projection.
    """

    def block(config: Config) -> Weights:
        inner, n_heads = channels(config), config.size("num_heads", "mamba_n_heads", "mamba_num_heads")
        convolved = inner + 2 * config.size("mamba_n_groups", "n_groups") * _states(config)
        bias = _mamba_bias(config)
        back = linear(inner, width(config), bias if out_bias is None else on(config, out_bias))
        around = linear(width(config), inner + convolved + n_heads, bias) + back
        return around + _convolution(config, convolved) + Weights(other=3 * n_heads) + norm(inner * on(config, normed))

    return block


def _convolution(config: Config, channels: int) -> Weights:
    bias = all(on(config, name) for name in ("mamba_conv_bias", "use_conv_bias") if name in config.fields)
    return Weights(other=channels * (config.size("mamba_d_conv", "conv_kernel") + bias))


def _mamba_bias(config: Config) -> bool:
    return config.flag("use_bias", "mamba_proj_bias", default=False)


_states = field("state_size", "mamba_d_state", "ssm_state_size")


def _time_step_rank(config: Config) -> int:
    names, automatic = ("time_step_rank", "mamba_dt_rank"), -(-width(config) // 16)
    if any(config.fields.get(name) == "auto" for name in names):
        return automatic
    return config.size(*names, default=automatic)


def delta_net(config: Config) -> Weights:
    """Gated delta net (arXiv:2412.06464)."""
    n_heads, d_value = config.size("linear_num_value_heads"), config.size("linear_value_head_dim")
    keys = config.size("linear_num_key_heads") * config.size("linear_key_head_dim")
    values = n_heads * d_value
    around = linear(width(config), 2 * keys + 2 * values + 2 * n_heads) + linear(values, width(config))
    convolution = (2 * keys + values) * config.size("linear_conv_kernel_dim")
    return around + Weights(other=convolution + 2 * n_heads) + norm(d_value)


def short_conv(config: Config) -> Weights:
    """A gated convolution over the last few tokens (LFM2)."""
    bias = on(config, "conv_bias")
    around = linear(width(config), 3 * width(config), bias) + linear(width(config), width(config), bias)
    return around + Weights(other=width(config) * (config.size("conv_L_cache") + bias))
