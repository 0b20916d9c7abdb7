"""The blocks of each family of models, and how many of its layers have them."""

from kvprobe.errors import UserError
from kvprobe.memory.blocks import (
    Block,
    Weights,
    attention,
    decoder,
    delta_net,
    expanded,
    experts,
    gate,
    gated_mlp,
    head_norms,
    in_layers,
    in_sparse_layers,
    indexer,
    intermediate_size,
    latent_attention,
    linear,
    mamba1,
    mamba2,
    mixture,
    norm,
    plain_mlp,
    qk_norms,
    short_conv,
)
from kvprobe.memory.config import Config
from kvprobe.memory.heads import Switch, d_head, field, heads, kv_heads, on, width
from kvprobe.memory.layer_types import layer_types, layers


def _qwen_sparse(config: Config) -> int:
    step = config.size("decoder_sparse_step", default=1)
    sparse = range(step - 1, layers(config), step) if experts(config) else range(0)
    return len(sparse) - _listed(config, "mlp_only_layers", sparse)


def _llama4_sparse(config: Config) -> int:
    if config.has("moe_layers"):
        return _listed(config, "moe_layers", range(layers(config)))
    return layers(config) // config.size("interleave_moe_layer_step", default=1)


def _listed(config: Config, name: str, among: range) -> int:
    """How many of these layers are in the list of this name; 0 if the config has none."""
    listed = config.items(name) if config.has(name) else []
    return len({layer for layer in listed if isinstance(layer, int) and layer in among})


def _jamba_sparse(config: Config) -> int:
    period, offset = config.size("expert_layer_period", default=2), config.size("expert_layer_offset", default=1, low=0)
    return len(range(offset, layers(config), period)) if experts(config) > 1 else 0


def _deepseek_sparse(config: Config) -> int:
    if config.has("mlp_layer_types"):
        return config.items("mlp_layer_types", layers(config)).count("sparse")
    return max(layers(config) - config.size("first_k_dense_replace", low=0), 0)


def _nemotron_sparse(config: Config) -> int:
    for name in ("layer_types", "layers_block_type"):
        if config.has(name):
            return config.items(name).count("moe")
    return config.word("hybrid_override_pattern").count("E")


# The blocks of single families


def _falcon_norms(config: Config) -> int:
    if not on(config, "parallel_attn"):
        return 2
    default = 2 if on(config, "new_decoder_architecture") else 1
    return 2 if config.size("num_ln_in_parallel_attn", default=default) == 2 else 1


def _falcon_h1_channels(config: Config) -> int:
    return config.optional_size("mamba_d_ssm") or expanded(config)


def _stablelm_norms(config: Config) -> int:
    return 1 if on(config, "use_parallel_residual") else 2


def _four_times(config: Config) -> int:
    return config.size("n_inner", "ffn_hidden_size", default=4 * width(config))


def _positions(config: Config) -> Weights:
    return Weights(embedding=config.size("n_positions", "max_position_embeddings") * width(config))


def _image_tokens(config: Config) -> Weights:
    """Mllama embeds eight more tokens than it predicts."""
    return Weights(embedding=8 * width(config))


def _head_bias(switch: Switch = True) -> Block:
    return lambda config: Weights(other=config.size("vocab_size")) * on(config, switch)


def _sinks(config: Config) -> Weights:
    return Weights(other=heads(config))


def _gpt2() -> tuple[Block, ...]:
    layer = decoder(attention(True), plain_mlp(_four_times, True), bias=True)
    cross = in_layers(_crossing, attention(True, kv_heads=heads), lambda config: norm(width(config), bias=True))
    return layer, cross, _positions


def _crossing(config: Config) -> int:
    return layers(config) if on(config, "add_cross_attention") else 0


_expert_width = field("moe_intermediate_size")


def _deepseek_moe(bias: Switch = False) -> Block:
    """With the shared experts as one MLP, and the bias of MLPs."""
    shared = gated_mlp(lambda config: _expert_width(config) * config.size("n_shared_experts", low=0), bias)
    return in_sparse_layers(_deepseek_sparse, gated_mlp(bias=bias), mixture(gated_mlp(_expert_width)), shared)


def _lfm2_width(config: Config) -> int:
    inner = config.size("block_ff_dim", "intermediate_size")
    if not on(config, "block_auto_adjust_ff_dim"):
        return inner
    factor = config.fields.get("block_ffn_dim_multiplier", 1)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1000:
        raise UserError(
            f"{config.name} has an invalid block_ffn_dim_multiplier in its config; give a number between 0 and 1000."
        )
    multiple = config.size("block_multiple_of")
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _nemotron_h(config: Config) -> Weights:
    """One block per layer, after one norm; experts may read fewer dimensions than the residual stream has."""
    sparse, types = _nemotron_sparse(config), layer_types(config)
    latent = config.optional_size("moe_latent_size")
    blocks = (
        in_layers("linear", mamba2(lambda config: config.size("mamba_num_heads") * config.size("mamba_head_dim"))),
        in_layers("full", attention()),
        in_layers(lambda _: types.count("none") - sparse, plain_mlp(bias="mlp_bias")),
        in_layers(lambda _: sparse, plain_mlp(field("moe_shared_expert_intermediate_size"), "mlp_bias")),
        in_layers(lambda _: sparse, mixture(plain_mlp(_expert_width, width=lambda config: latent or width(config)))),
        in_layers(lambda _: sparse if latent else 0, plain_mlp(lambda _: latent or 0, "mlp_bias")),
    )
    return sum((block(config) for block in blocks), norm(width(config)) * (len(types) + 1))


def _gemma3n_widths(config: Config) -> int:
    """The sum of the widths inside all MLPs."""
    if not isinstance(config.fields.get("intermediate_size", config.defaults.get("intermediate_size")), list):
        return intermediate_size(config) * layers(config)
    inner_widths = config.items("intermediate_size", layers(config))
    return sum(intermediate_size(Config(config.name, {"intermediate_size": inner})) for inner in inner_widths)


def _gemma3n_beside(config: Config) -> Weights:
    """Keys and values, which the last layers share; the streams of AltUp (arXiv:2301.13310); low-rank residuals; an
    embedding for each layer."""
    depth, d_model, d_layer = layers(config), width(config), config.size("hidden_size_per_layer_input")
    keys, unshared = kv_heads(config) * d_head(config), depth - config.size("num_kv_shared_layers", low=0)
    keys_values = linear(d_model, 2 * keys, on(config, "attention_bias")) + norm(d_head(config))
    queries = norm(d_head(config))

    streams, rank = config.size("altup_num_inputs"), config.size("laurel_rank")
    altup = Weights(other=2 * d_model + streams * (d_model + streams + streams**2))
    laurel = linear(d_model, rank) + linear(rank, d_model) + norm(d_model)
    layer_input = linear(d_model, d_layer) + linear(d_layer, d_model) + norm(d_model)
    layer_inputs = linear(d_model, depth * d_layer) + norm(d_layer)
    layer_inputs += Weights(embedding=config.size("vocab_size_per_layer_input") * depth * d_layer)
    around_streams = linear(d_model, d_model) * (2 * (streams - 1))
    return keys_values * unshared + (queries + altup + laurel + layer_input) * depth + layer_inputs + around_streams


_LLAMA = decoder(attention("attention_bias"), gated_mlp(bias="mlp_bias"))
_MISTRAL = decoder(attention(), gated_mlp())
_MIXTRAL = mixture(gated_mlp())
_OLMO2 = decoder(attention("attention_bias"), qk_norms(), gated_mlp())
_QWEN_MIXTURE = (mixture(gated_mlp(_expert_width)), gated_mlp(field("shared_expert_intermediate_size")), gate)
_DELTA_NET = (in_layers("linear", delta_net), in_layers("full", attention("attention_bias", gated=True), head_norms()))
_MAMBA = decoder(mamba1(lambda config: config.size("intermediate_size", default=expanded(config))), norms=1)

BLOCKS: dict[str, tuple[Block, ...]] = {
    "llama": (_LLAMA,),
    "granite": (_LLAMA,),
    "smollm3": (_LLAMA,),
    "seed_oss": (decoder(attention("attention_bias", "attention_out_bias"), gated_mlp(bias="mlp_bias")),),
    "mistral": (_MISTRAL,),
    "ministral3": (_MISTRAL,),
    "phi3": (_MISTRAL,),
    "mllama_text_model": (_MISTRAL, in_layers("cross", head_norms(), lambda _: Weights(other=2)), _image_tokens),
    "gemma": (decoder(attention("attention_bias"), gated_mlp()),),
    "gemma2": (decoder(attention("attention_bias"), gated_mlp(), norms=4),),
    "gemma3_text": (decoder(attention("attention_bias"), head_norms(), gated_mlp(), norms=4),),
    "gemma3n_text": (
        decoder(attention("attention_bias", kv_heads=lambda _: 0), norms=4),
        gated_mlp(_gemma3n_widths),
        _gemma3n_beside,
    ),
    "qwen2": (decoder(attention(True, False), gated_mlp()),),
    "qwen3": (decoder(attention("attention_bias"), head_norms(), gated_mlp()),),
    "exaone4": (decoder(attention(), head_norms(), gated_mlp()),),
    "olmo": (in_layers(layers, attention("attention_bias"), gated_mlp()),),
    "olmo2": (_OLMO2,),
    "olmo3": (_OLMO2,),
    "cohere": (decoder(attention("attention_bias"), qk_norms("use_qk_norm"), gated_mlp(), norms=1),),
    "cohere2": (decoder(attention("attention_bias"), gated_mlp(), norms=1),),
    "glm": (decoder(attention("attention_bias", False), gated_mlp()),),
    "glm4": (decoder(attention("attention_bias", False), gated_mlp(), norms=4),),
    "stablelm": (
        decoder(
            attention("use_qkv_bias", False), qk_norms("qk_layernorm"), gated_mlp(), norms=_stablelm_norms, bias=True
        ),
    ),
    "gpt2": _gpt2(),
    "gpt_bigcode": _gpt2(),
    "gptj": (decoder(attention(), plain_mlp(_four_times, True), norms=1, bias=True), _head_bias()),
    "gpt_neox": (decoder(attention("attention_bias"), plain_mlp(bias=True), bias=True),),
    "starcoder2": (decoder(attention("use_bias"), plain_mlp(bias="use_bias"), bias=True),),
    "phi": (
        decoder(attention(True), head_norms("qk_layernorm", bias=True), plain_mlp(bias=True), norms=1, bias=True),
        _head_bias(),
    ),
    "falcon": (decoder(attention("bias"), plain_mlp(_four_times, "bias"), norms=_falcon_norms, bias=True),),
    "mixtral": (decoder(attention(), _MIXTRAL),),
    "granitemoe": (decoder(attention("attention_bias"), _MIXTRAL),),
    "olmoe": (decoder(attention("attention_bias"), qk_norms(), _MIXTRAL),),
    "phimoe": (decoder(attention("attention_bias"), _MIXTRAL, bias=True), _head_bias("lm_head_bias")),
    "gpt_oss": (decoder(attention("attention_bias"), _sinks, mixture(gated_mlp(bias=True), router_bias=True)),),
    "qwen2_moe": (decoder(attention("qkv_bias", False)), in_sparse_layers(_qwen_sparse, gated_mlp(), *_QWEN_MIXTURE)),
    "qwen3_moe": (
        decoder(attention("attention_bias"), head_norms()),
        in_sparse_layers(_qwen_sparse, gated_mlp(), mixture(gated_mlp(_expert_width))),
    ),
    "qwen3_next": (decoder(), *_DELTA_NET, in_sparse_layers(_qwen_sparse, gated_mlp(), *_QWEN_MIXTURE)),
    "qwen3_5_text": (decoder(gated_mlp()), *_DELTA_NET),
    "llama4_text": (
        decoder(attention("attention_bias")),
        in_sparse_layers(_llama4_sparse, gated_mlp(field("intermediate_size_mlp")), _MIXTRAL, gated_mlp()),
    ),
    "deepseek_v2": (decoder(latent_attention), _deepseek_moe("mlp_bias")),
    "deepseek_v3": (decoder(latent_attention), _deepseek_moe()),
    "deepseek_v32": (decoder(latent_attention, indexer), _deepseek_moe()),
    "mamba": (_MAMBA,),
    "falcon_mamba": (_MAMBA,),
    "mamba2": (decoder(mamba2(), norms=1),),
    "jamba": (
        decoder(),
        in_layers("linear", mamba1(normed=True)),
        in_layers("full", attention()),
        in_sparse_layers(_jamba_sparse, gated_mlp(), _MIXTRAL),
    ),
    "bamba": (
        decoder(gated_mlp(bias="mlp_bias")),
        in_layers("linear", mamba2()),
        in_layers("full", attention("attention_bias")),
    ),
    "granitemoehybrid": (
        decoder(gated_mlp(field("shared_intermediate_size")), _MIXTRAL),
        in_layers("linear", mamba2()),
        in_layers("full", attention("attention_bias")),
    ),
    "falcon_h1": (
        decoder(
            mamba2(_falcon_h1_channels, normed="mamba_rms_norm", out_bias="projectors_bias"),
            attention("attention_bias"),
            gated_mlp(bias="mlp_bias"),
        ),
    ),
    "nemotron_h": (_nemotron_h,),
    "lfm2": (
        decoder(gated_mlp(_lfm2_width)),
        in_layers("conv", short_conv),
        in_layers("full", attention(), head_norms()),
    ),
}

NEVER_TIED = frozenset({"mllama_text_model", "nemotron_h"})
"""Families whose head transformers never ties, whatever the config says."""
