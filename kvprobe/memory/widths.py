"""How wide the tensors of a decoder layer are, family by family."""

from dataclasses import dataclass

from kvprobe.memory.caches import LayerStore
from kvprobe.memory.config import Config
from kvprobe.memory.formats import WIDTH


@dataclass(frozen=True)
class Widths:
    """Sizes of the tensors of a decoder layer, in numbers per token.

    Attributes:
        hidden: of the residual stream.
        normed: of its norm, while an MLP runs.
        mlp: in memory at once inside the widest MLP.
        d_head: of a query head.
        positions: in tables that all rows share: cosines and sines, or learned position embeddings.
        vocabulary: logits.
        capped: copies of the logits that a soft cap needs.
        fused: whether queries, keys and values are one tensor, which is held while a layer attends.
        masked: whether full attention gets a mask too, without the flag that K has fewer heads; with one KV head, fused
            attention then computes scores.
        sinks: whether eager attention appends a sink to the scores, which copies them.
        exact: whether `mlp` follows the code; else it is an estimate.
    """

    hidden: int
    normed: int
    mlp: int
    d_head: int
    positions: int
    vocabulary: int
    capped: int
    fused: bool
    masked: bool
    sinks: bool
    exact: bool


FOLLOWED = frozenset((
    "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "ministral3", "granite", "seed_oss",
    "smollm3", "phi", "phi3", "glm", "glm4", "olmo", "olmo2", "cohere", "cohere2", "gpt2", "gpt_bigcode", "mixtral",
    "qwen3_moe", "olmoe", "granitemoe", "phimoe",
))  # fmt: skip
"""Families whose widths follow the code of transformers, within three percent; those of others are estimates."""

_PLAIN_MLP = {"gpt2": 4, "gptj": 4, "phi": 4, "gpt_neox": 2, "gpt_bigcode": 2, "falcon": 2, "starcoder2": 2}
"""MLPs without a gate, and how many tensors of their width are in memory at once: gelu_new is five operations."""

_FUSED_GATE = ("phi3", "glm", "glm4")
"""Gate and up are one projection, which is held while both halves are used."""

_FUSED_QKV = ("phi3", "gpt2", "gpt_bigcode", "gpt_neox", "falcon")
"""Queries, keys and values are one projection."""

_NORM_AFTER = ("olmo2", "olmo3", "exaone4")
"""Blocks whose MLP reads the residual stream without a norm."""

_ROTATED = {"phi": 0.5, "glm": 0.5, "glm4": 0.5, "gpt_neox": 0.25, "stablelm": 0.25}
"""Families that rotate only this share of a head, unless the config states another."""


def widths_of(config: Config, layers: tuple[LayerStore, ...]) -> Widths:
    """The widths of a text model.

    Raises:
        UserError: a size is missing or impossible.
    """
    hidden = config.size(*WIDTH)
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    d_head = attentions[0].d_key if attentions else 0
    if attentions and attentions[0].latent:
        d_head = config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")
    # Gemma 3 rotates sliding and full layers at different frequencies, and holds cosines and sines for both.
    tables = 2 if config.kind in ("gemma3_text", "gemma3n_text") else 1
    positions = tables * 2 * _rotated(config, d_head) if attentions else 0
    if config.kind in ("gpt2", "gpt_bigcode"):
        positions = hidden
    return Widths(
        hidden=hidden,
        normed=0 if config.kind in _NORM_AFTER else hidden,
        mlp=_mlp(config, hidden, layers),
        d_head=d_head,
        positions=positions,
        vocabulary=config.size("vocab_size"),
        capped=1 if config.has("final_logit_softcapping") else 0,
        fused=config.kind in _FUSED_QKV,
        masked=config.kind == "falcon",
        sinks=config.kind == "gpt_oss",
        exact=config.kind in FOLLOWED,
    )


def _mlp(config: Config, hidden: int, layers: tuple[LayerStore, ...]) -> int:
    kind = config.kind
    widest = max((layer.state.channels for layer in layers if layer.state is not None), default=0)
    recurrent = 4 * widest
    if kind in _PLAIN_MLP:
        names = {"gpt2": "n_inner", "gptj": "n_inner", "gpt_bigcode": "n_inner", "falcon": "ffn_hidden_size"}
        inner = config.optional_size(names.get(kind, "intermediate_size")) or 4 * hidden
        # GPT-2's blocks hold attention's output.
        return _PLAIN_MLP[kind] * inner + (hidden if kind in ("gpt2", "gpt_bigcode") else 0)
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return recurrent
    dense = (4 if kind in _FUSED_GATE else 3) * _dense_width(config)
    # Each token is copied to its experts, whose gate and up are one tensor; in Llama 4, to all experts.
    names = ("num_experts_per_tok", "num_experts_per_token")
    copies = config.size(*(("num_local_experts",) if kind == "llama4_text" else names), default=0, low=0)
    expert = config.size("moe_intermediate_size", "intermediate_size", default=0, low=0) if copies else 0
    return max(dense, copies * (hidden + 4 * expert), recurrent)


def _dense_width(config: Config) -> int:
    """The width inside the widest dense MLP; 0 if there is none."""
    if isinstance(config.fields.get("intermediate_size"), list):  # Gemma 3n states one for each layer
        widths = config.items("intermediate_size")
        return max(Config(config.name, {"intermediate_size": width}).size("intermediate_size") for width in widths)
    return config.size("intermediate_size", default=0, low=0)


def _rotated(config: Config, d_head: int) -> int:
    """How many numbers of a head are rotated."""
    fields: dict[str, object] = {**config.fields}
    if isinstance(fields.get("rope_parameters"), dict):
        fields |= config.within("rope_parameters").fields
    part = fields.get("partial_rotary_factor", fields.get("rotary_pct", _ROTATED.get(config.kind, 1.0)))
    return int(d_head * part) if isinstance(part, int | float) and 0 < part <= 1 else d_head
