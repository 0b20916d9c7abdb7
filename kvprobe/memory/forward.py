"""What a forward pass of transformers needs beside weights and cache: tensors that live for a moment.

Followed line by line through the decoder layers of transformers 5.23 in inference mode: while a layer's MLP runs, the
embeddings, the layer's input, the residual after attention, its norm and three tensors as wide as the MLP are alive; while
a sliding layer attends, the mask is there as bits in bytes and, for as long as the layer attends, as floats. Measured on SmolLM2 and
Gemma 3, and on small random models of the families in `_FOLLOWED` within three percent (docs/memory.md). For
others it is an estimate.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from kvprobe.memory import hf
from kvprobe.memory.caches import Attention, Layer
from kvprobe.memory.config import Config
from kvprobe.memory.request import Request

Kernel = Literal["sdpa", "eager"]
Logits = Literal["last", "all"]

POSITION_BYTES = 8
"""Of a token's position, an int64."""


@dataclass(frozen=True)
class Widths:
    """Sizes of the tensors of a decoder layer, in numbers per token.

    Attributes:
        hidden: of the residual stream.
        normed: of its norm beside it, while an MLP runs.
        mlp: alive at once inside the widest MLP.
        d_head: of a query head.
        positions: in tables that all rows share: cosines and sines, or what is learned of each position.
        vocabulary: logits.
        capped: copies of the logits that a soft cap needs beside them.
        fused: whether queries, keys and values are one tensor, which stays while a layer attends.
        masked: whether full attention is given a mask too, and torch not told that K has fewer heads: where it has one, fused
            attention falls back to scores.
        sinks: whether eager attention joins a sink to the scores, which copies them.
        exact: whether `mlp` was followed through the code; else it is an estimate.
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


_PLAIN_MLP = {"gpt2": 4, "gptj": 4, "phi": 4, "gpt_neox": 2, "gpt_bigcode": 2, "falcon": 2, "starcoder2": 2}
"""MLPs without a gate, and how many tensors of their width are alive: gelu_new is written out in five operations."""

_FUSED_GATE = ("phi3", "glm", "glm4")
"""Gate and up are one projection, which stays while both halves are used."""

_FUSED_QKV = ("phi3", "gpt2", "gpt_bigcode", "gpt_neox", "falcon")
"""Queries, keys and values are one projection."""

_NORM_AFTER = ("olmo2", "olmo3", "exaone4")
"""Blocks whose MLP reads the residual stream as it is, so that there is no norm of it beside."""

_TURNED = {"phi": 0.5, "glm": 0.5, "glm4": 0.5, "gpt_neox": 0.25, "stablelm": 0.25}
"""Families that turn only this part of a head, unless the config says how much."""

_NO_SDPA = ("gemma2", "gpt_oss", "gptj")
"""Families that transformers reads with eager attention unless told otherwise: their scores are capped or have sinks."""

_FOLLOWED = frozenset(
    [
        "llama",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "mistral",
        "ministral3",
        "granite",
        "seed_oss",
        "smollm3",
        "phi",
        "phi3",
        "glm",
        "glm4",
        "olmo",
        "olmo2",
        "cohere",
        "cohere2",
        "gpt2",
        "gpt_bigcode",
        "mixtral",
        "qwen3_moe",
        "olmoe",
        "granitemoe",
        "phimoe",
    ]
)


def usual_kernel(config: Config) -> Kernel:
    """The attention that transformers takes for this family."""
    return "eager" if config.kind in _NO_SDPA else "sdpa"


def widths_of(config: Config, layers: tuple[Layer, ...]) -> Widths:
    """The widths of a text model.

    Raises:
        UserError: a size is missing or impossible.
    """
    hidden = config.size("hidden_size", "n_embd")
    attentions = [layer.attention for layer in layers if layer.attention is not None]
    d_head = attentions[0].d_key if attentions else 0
    if attentions and attentions[0].latent:
        d_head = config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")
    # Gemma 3 turns sliding and full layers at different speeds, and holds cosines and sines for both.
    speeds = 2 if config.kind in ("gemma3_text", "gemma3n_text") else 1
    positions = speeds * 2 * _turned(config, d_head) if attentions else 0
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
        exact=config.kind in _FOLLOWED,
    )


def _mlp(config: Config, hidden: int, layers: tuple[Layer, ...]) -> int:
    kind = config.kind
    widest = max((layer.state.channels for layer in layers if layer.state is not None), default=0)
    recurrent = 4 * widest
    if kind in _PLAIN_MLP:
        names = {"gpt2": "n_inner", "gptj": "n_inner", "gpt_bigcode": "n_inner", "falcon": "ffn_hidden_size"}
        inner = config.optional_size(names.get(kind, "intermediate_size")) or 4 * hidden
        # GPT-2's blocks keep attention's output.
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
    """Of the widest dense MLP; 0 where there is none."""
    if isinstance(config.fields.get("intermediate_size"), list):  # Gemma 3n states one for each layer
        sizes = config.items("intermediate_size")
        return max(Config(config.name, {"intermediate_size": each}).size("intermediate_size") for each in sizes)
    return config.size("intermediate_size", default=0, low=0)


def _turned(config: Config, d_head: int) -> int:
    """Numbers of a head that have a position."""
    fields: dict[str, object] = {**config.fields}
    if isinstance(fields.get("rope_parameters"), dict):
        fields |= config.within("rope_parameters").fields
    part = fields.get("partial_rotary_factor", fields.get("rotary_pct", _TURNED.get(config.kind, 1.0)))
    return int(d_head * part) if isinstance(part, int | float) and 0 < part <= 1 else d_head


@dataclass(frozen=True)
class Transient:
    """Bytes beside weights and cache at the moment when a pass needs most.

    Attributes:
        cache: that is there at that moment.
        activations: residual stream, MLP, rotary tables, masks.
        logits: at that moment; 0 where it is not the last one.
        growth: of a layer's keys or values, which stand twice while they are copied to be one longer.
    """

    cache: int
    activations: int
    logits: int = 0
    growth: int = 0

    @property
    def total(self) -> int:
        return self.cache + self.activations + self.logits + self.growth


def reading(layers: tuple[Layer, ...], widths: Widths, request: Request, kernel: Kernel, logits: Logits) -> Transient:
    """The prompt is read in one pass, into an empty cache."""
    whole = request.after_prompt
    sizes = hf.held(layers, whole)
    moments = []
    masks = _mask_bytes(layers, widths, whole, kernel)
    number = request.dtype.bytes(1)
    tokens = request.batch * request.prompt
    for layer, (attention, stored) in enumerate(
        zip((each.attention for each in layers), accumulate(sizes), strict=True)
    ):
        # The embeddings are the first layer's input.
        streams = (1 if layer == 0 else 2) * widths.hidden
        # Positions and their tables are the same for all rows.
        base = masks + (POSITION_BYTES + number * widths.positions) * request.prompt
        mlp = streams + widths.hidden + widths.normed + widths.mlp
        # The layer's variables keep what eager attention returns beside its output.
        patterns = whole.batch * attention.heads * whole.prompt**2 * number if attention and kernel == "eager" else 0
        moments.append(Transient(stored, base + number * tokens * mlp + patterns))
        if attention is not None:
            attending = number * tokens * (streams + widths.hidden) + _attending(attention, widths, whole, kernel)
            moments.append(Transient(stored, base + attending))
    rows = tokens if logits == "all" else request.batch
    found = number * rows * widths.vocabulary
    moments.append(
        Transient(
            sum(sizes), number * tokens * widths.hidden + POSITION_BYTES * request.prompt, (1 + widths.capped) * found
        )
    )
    return max(moments, key=lambda moment: moment.total)


def _mask_bytes(layers: tuple[Layer, ...], widths: Widths, request: Request, kernel: Kernel) -> int:
    """Of the masks that stay for the whole pass: one for each kind of layer that needs one."""
    prompt, number = request.prompt, request.dtype.bytes(1)
    kinds = {(layer.attention.reach, layer.attention.chunked) for layer in layers if layer.attention is not None}
    if kernel == "eager":
        return len(kinds) * request.batch * number * prompt**2
    return sum(prompt**2 for reach, _ in kinds if widths.masked or (reach is not None and prompt >= reach))


def _attending(attention: Attention, widths: Widths, request: Request, kernel: Kernel) -> int:
    """Of queries, output, and what the kernel makes of mask, keys and values."""
    prompt, number = request.prompt, request.dtype.bytes(1)
    tokens = request.batch * prompt
    wide = attention.heads * widths.d_head
    masked = widths.masked or (attention.reach is not None and prompt >= attention.reach)
    # Keys of one head are repeated as a view; of several, as a copy.
    copied = 1 < attention.kv_heads < attention.heads and attention.copies is None
    repeated = 2 * wide if copied and (masked or kernel == "eager") else 0
    if widths.fused:
        repeated += wide + attention.kv_heads * (attention.d_key + attention.d_value)
    square = request.batch * prompt**2
    if kernel == "eager":
        # Scores, and their softmax in float32; the output comes when one of them has gone.
        scores = 3 * number if widths.sinks else number + 4
        return number * tokens * (wide + repeated) + attention.heads * square * scores
    if widths.masked and attention.kv_heads == 1:
        # Scores, their softmax, the mask as floats, and where it forbids all.
        return number * tokens * (wide + repeated) + square * 2 * number * (attention.heads + 1)
    return number * tokens * (2 * wide + repeated) + (square * number if masked else 0)


def growing(layers: tuple[Layer, ...], widths: Widths, request: Request, kernel: Kernel) -> Transient:
    """One more token is read, after which the cache is as `request` says: layer after layer is copied to be longer."""
    before, after = hf.held(layers, replace(request, new=request.new - 1)), hf.held(layers, request)
    number = request.dtype.bytes(1)
    passing = number * request.batch * (4 * widths.hidden + widths.mlp + widths.positions)
    rows = number * request.batch * widths.vocabulary
    moments = [Transient(sum(after), number * request.batch * widths.hidden, (1 + widths.capped) * rows)]
    held = sum(before)
    for layer, attention in enumerate(each.attention for each in layers):
        if attention is not None and not attention.crosses:
            moments.append(Transient(held, passing, growth=_copies(attention, before[layer], after[layer], request)))
            moments.append(
                Transient(held - before[layer] + after[layer], passing + _looking_back(attention, request, kernel))
            )
        held += after[layer] - before[layer]
    return max(moments, key=lambda moment: moment.total)


def _copies(attention: Attention, before: int, after: int, request: Request) -> int:
    """Beside a layer's keys and values, when the longer ones are made."""
    if not request.numbers.is_plain:
        # They are dequantised whole, and joined with the new ones.
        numbers = (attention.copies or attention.kv_heads) * (attention.d_key + attention.d_value)
        return 2 * request.batch * request.context * numbers * request.dtype.bytes(1)
    key = attention.d_key / (attention.d_key + attention.d_value)
    # The new keys stand beside the old ones, which go before the new values come.
    return round(max(after * key, after - before * key))


def _looking_back(attention: Attention, request: Request, kernel: Kernel) -> int:
    """Of one token's attention to all others: eager attention repeats keys and values to all query heads, and has scores."""
    if kernel == "sdpa":
        return 0
    number = request.dtype.bytes(1)
    slots = min(request.context, attention.reach or request.context)
    repeated = (
        attention.heads * (attention.d_key + attention.d_value) if 1 < attention.kv_heads < attention.heads else 0
    )
    return request.batch * slots * (number * repeated + attention.heads * (number + 4))


def stepping(widths: Widths, request: Request, tokens: int) -> Transient:
    """One step of an engine that reads at most so many tokens at a time and never makes a mask: an estimate."""
    number = request.dtype.bytes(1)
    activations = number * tokens * (4 * widths.hidden + widths.mlp + widths.positions)
    # Sampling takes the logits of each conversation's last token to float32.
    return Transient(0, activations, (number + 4) * request.batch * widths.vocabulary)
