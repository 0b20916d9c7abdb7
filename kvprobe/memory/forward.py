"""What a forward pass of transformers needs beside weights and cache: tensors that are freed before it ends.

The counts follow the decoder layers of transformers 5.23 line by line, in inference mode. While a layer's MLP runs,
these are in memory: the embeddings, the layer's input, the residual stream after attention, its norm, and three tensors
as wide as the MLP. While a sliding layer attends, its mask is there twice, as booleans and as floats. Measured on
SmolLM2 and on Gemma 3, and on small random models (docs/results/memory.md).
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from kvprobe.memory import hf
from kvprobe.memory.caches import AttentionStore, LayerStore
from kvprobe.memory.request import Request
from kvprobe.memory.widths import Widths

Kernel = Literal["sdpa", "eager"]
Logits = Literal["last", "all"]

POSITION_BYTES = 8
"""Of a token's position, an int64."""


@dataclass(frozen=True)
class Phase:
    """Bytes beside the weights in one phase of a pass.

    Attributes:
        cache: what of it is stored by then.
        activations: residual stream, MLP, rotary tables, masks.
        logits: 0 in all phases but the last.
        growth: a second copy of a layer's keys or values, while they are copied to be one token longer.
    """

    cache: int
    activations: int
    logits: int = 0
    growth: int = 0

    @property
    def total(self) -> int:
        return self.cache + self.activations + self.logits + self.growth


def reading(layers: tuple[LayerStore, ...], widths: Widths, request: Request, kernel: Kernel, logits: Logits) -> Phase:
    """The fullest phase of one pass that reads the prompt into an empty cache."""
    whole = request.after_prompt
    sizes = hf.held(layers, whole)
    phases = []
    masks = _mask_bytes(layers, widths, whole, kernel)
    number = request.dtype.bytes(1)
    tokens = request.batch * request.prompt
    for index, (layer, stored) in enumerate(zip(layers, accumulate(sizes), strict=True)):
        attention = layer.attention
        # The embeddings are the first layer's input.
        streams = (1 if index == 0 else 2) * widths.hidden
        # Positions and their tables are the same for all rows.
        base = masks + (POSITION_BYTES + number * widths.positions) * request.prompt
        mlp = streams + widths.hidden + widths.normed + widths.mlp
        # Eager attention returns its pattern too, and the layer's variables hold on to it.
        patterns = whole.batch * attention.heads * whole.prompt**2 * number if attention and kernel == "eager" else 0
        phases.append(Phase(stored, base + number * tokens * mlp + patterns))
        if attention is not None:
            attending = number * tokens * (streams + widths.hidden) + _attending(attention, widths, whole, kernel)
            phases.append(Phase(stored, base + attending))
    rows = tokens if logits == "all" else request.batch
    logit_bytes = (1 + widths.capped) * number * rows * widths.vocabulary
    last_activations = number * tokens * widths.hidden + POSITION_BYTES * request.prompt
    phases.append(Phase(sum(sizes), last_activations, logit_bytes))
    return max(phases, key=lambda phase: phase.total)


def _mask_bytes(layers: tuple[LayerStore, ...], widths: Widths, request: Request, kernel: Kernel) -> int:
    """Bytes of the masks that are held for the whole pass: one for each kind of layer that needs one."""
    prompt, number = request.prompt, request.dtype.bytes(1)
    kinds = {(layer.attention.reach, layer.attention.chunked) for layer in layers if layer.attention is not None}
    if kernel == "eager":
        return len(kinds) * request.batch * number * prompt**2
    return sum(prompt**2 for reach, _ in kinds if widths.masked or (reach is not None and prompt >= reach))


def _attending(attention: AttentionStore, widths: Widths, request: Request, kernel: Kernel) -> int:
    """Bytes of queries, output, and the kernel's copies of mask, keys and values."""
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
        # Scores, and their softmax in float32; the output is made when one of them has been freed.
        scores = 3 * number if widths.sinks else number + 4
        return number * tokens * (wide + repeated) + attention.heads * square * scores
    if widths.masked and attention.kv_heads == 1:
        # Scores, their softmax, the mask as floats, and the rows in which it hides every slot.
        return number * tokens * (wide + repeated) + square * 2 * number * (attention.heads + 1)
    return number * tokens * (2 * wide + repeated) + (square * number if masked else 0)


def growing(layers: tuple[LayerStore, ...], widths: Widths, request: Request, kernel: Kernel) -> Phase:
    """The fullest phase of reading the last token, where layer after layer of the cache is copied to be one longer."""
    before, after = hf.held(layers, replace(request, new=request.new - 1)), hf.held(layers, request)
    number = request.dtype.bytes(1)
    passing = number * request.batch * (4 * widths.hidden + widths.mlp + widths.positions)
    rows = number * request.batch * widths.vocabulary
    phases = [Phase(sum(after), number * request.batch * widths.hidden, (1 + widths.capped) * rows)]
    held = sum(before)
    for index, layer in enumerate(layers):
        attention = layer.attention
        if attention is not None and not attention.crosses:
            phases.append(Phase(held, passing, growth=_copies(attention, before[index], after[index], request)))
            phases.append(
                Phase(held - before[index] + after[index], passing + _looking_back(attention, request, kernel))
            )
        held += after[index] - before[index]
    return max(phases, key=lambda phase: phase.total)


def _copies(attention: AttentionStore, before: int, after: int, request: Request) -> int:
    """Bytes beside a layer's keys and values while the longer ones are made."""
    if not request.numbers.is_plain:
        # All of them are dequantised and joined with the new ones.
        numbers = (attention.copies or attention.kv_heads) * (attention.d_key + attention.d_value)
        return 2 * request.batch * request.context * numbers * request.dtype.bytes(1)
    key = attention.d_key / (attention.d_key + attention.d_value)
    # The new keys stand beside the old ones, which are freed before the new values are made.
    return round(max(after * key, after - before * key))


def _looking_back(attention: AttentionStore, request: Request, kernel: Kernel) -> int:
    """Bytes of one token's attention: eager attention repeats keys and values for all query heads, and has scores."""
    if kernel == "sdpa":
        return 0
    number = request.dtype.bytes(1)
    slots = min(request.context, attention.reach or request.context)
    repeated = (
        attention.heads * (attention.d_key + attention.d_value) if 1 < attention.kv_heads < attention.heads else 0
    )
    return request.batch * slots * (number * repeated + attention.heads * (number + 4))


def stepping(widths: Widths, request: Request, tokens: int) -> Phase:
    """An estimate of one step of an engine that reads at most so many tokens at once and never makes a mask."""
    number = request.dtype.bytes(1)
    activations = number * tokens * (4 * widths.hidden + widths.mlp + widths.positions)
    # Sampling takes the logits of each conversation's last token to float32.
    return Phase(0, activations, (number + 4) * request.batch * widths.vocabulary)
