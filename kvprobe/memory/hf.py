"""The caches of transformers 5.23, `DynamicCache(config)` and `QuantizedCache`, to the byte: storage, not views.

Three facts make them larger than their shapes suggest. After a prompt, a sliding layer holds a *view* of its last W − 1
slots, so the storage of the whole prompt is freed only when the next token is read; from then on it holds W. Falcon
with grouped heads stores K and V once for each query head. A window of 1 never drops anything, since a slice from −0
selects everything.
"""

from kvprobe.errors import UserError
from kvprobe.memory.caches import AttentionStore, LayerStore
from kvprobe.memory.numbers import Numbers
from kvprobe.memory.request import Request

GROUP = 64
"""Numbers that share a scale and a shift in quanto's cache."""

RESIDUAL = 128
"""Generated tokens that a quanto cache holds at full precision before it quantises everything again."""


def held(layers: tuple[LayerStore, ...], request: Request) -> list[int]:
    """Bytes of the storage that each layer's tensors hold.

    Raises:
        UserError: transformers does not have such a cache.
    """
    _refuse(layers, request)
    return [_layer(layer, number, len(layers), request) for number, layer in enumerate(layers)]


def _layer(layer: LayerStore, number: int, layers: int, request: Request) -> int:
    total = 0
    if layer.attention is not None:
        attention, heads = layer.attention, _heads(layer.attention)
        rows = rows_held(attention, request.prompt, request.new)
        if attention.crosses:
            rows = request.source
        elif request.plan.evicts:
            rows = min(rows, request.plan.kept(request.prompt, request.new, number, layers))
        if request.numbers.is_plain:
            numbers = heads * (attention.d_key + attention.d_value) + attention.d_index
            total += request.numbers.bytes(request.batch * rows * numbers)
        else:
            total += sum(_quantised(request, heads, d) for d in (attention.d_key, attention.d_value))
    if layer.state is not None:
        total += request.batch * layer.state.nbytes_with(layer.state.kernel, request.dtype)
    return total


def rows_held(attention: AttentionStore, prompt: int, new: int) -> int:
    """Slots that a layer's tensors hold."""
    context = prompt + new
    if attention.reach in (None, 1) or new == 0:
        return context
    return min(context, attention.reach)


def _heads(attention: AttentionStore) -> int:
    return attention.copies or attention.kv_heads


def _quantised(request: Request, heads: int, d: int) -> int:
    """Bytes of the keys or the values of one layer, for lengths that `check` accepts."""
    numbers = request.batch * heads * request.context * d
    if request.numbers.name == "fp8":
        return numbers + 4
    residual = request.new % RESIDUAL
    packed = request.batch * heads * (request.context - residual) * d
    groups = -(-packed // GROUP)
    # A byte holds the codes of several rows, so the last row of bytes may be partly empty.
    codes = -(-groups * request.numbers.bits // 8) * GROUP
    # quanto treats a single group as a row of channels, each with its own scale.
    scales = 2 * (GROUP if groups == 1 else groups) * request.dtype.bytes(1)
    return codes + scales + request.dtype.bytes(request.batch * heads * residual * d)


def fuller_steps(request: Request) -> list[int]:
    """Smaller numbers of generated tokens at which a quantised cache may hold more: just before it quantises again."""
    if request.numbers.name not in ("int4", "int2"):
        return []
    before = (request.new + 1) // RESIDUAL * RESIDUAL - 1
    return [before] if 0 <= before < request.new else []


def check(layers: tuple[LayerStore, ...], request: Request) -> None:
    """Refuse lengths whose numbers do not fill whole groups of quanto.

    Raises:
        UserError: a group would be partly empty.
    """
    if request.numbers.name not in ("int4", "int2"):
        return
    for attention in {layer.attention for layer in layers if layer.attention is not None}:
        for d in (attention.d_key, attention.d_value):
            for tokens in (request.prompt, request.context - request.new % RESIDUAL):
                if _heads(attention) * tokens * d % GROUP:
                    raise UserError(
                        f"A quanto cache needs whole groups of {GROUP} numbers in each row, and {_heads(attention)} "
                        f"heads × {tokens} tokens × {d} do not divide into them; change the context."
                    )


def check_format(numbers: Numbers) -> None:
    """Refuse what transformers does not store.

    Raises:
        UserError: it has no such cache.
    """
    if "hf" not in numbers.engines:
        raise UserError(
            f"transformers has no cache of {numbers.name}; use a float, fp8, int4 or int2, or engine='vllm'."
        )


def _refuse(layers: tuple[LayerStore, ...], request: Request) -> None:
    name = request.numbers.name
    check_format(request.numbers)
    if request.plan.rounds is not None:
        raise UserError(
            f"transformers has no cache like {request.plan.name}; use engine='logical' for its bytes, or "
            "cache_dtype='int4' for the quantised cache that transformers has."
        )
    if not all(eviction.even for eviction in request.plan.evicts):
        raise UserError(
            f"{request.plan.name} retains other slots in each head, but a tensor of transformers holds a slot for all "
            "heads; use engine='logical'."
        )
    if request.numbers.is_plain:
        if request.numbers != request.dtype:
            raise UserError(
                f"A cache in transformers has the model's dtype, {request.dtype.name}, not {name}; change dtype, or "
                "use engine='vllm'."
            )
        return
    if request.plan.evicts:
        raise UserError(f"transformers' quantised caches cannot evict ({request.plan.name}); give one of the two.")
    for number, layer in enumerate(layers):
        plain = layer.attention is not None and layer.attention.reach is None and layer.state is None
        if not plain or (layer.attention is not None and (layer.attention.d_index or layer.attention.crosses)):
            raise UserError(
                f"transformers quantises only caches of full attention, and layer {number} has {layer}; use a float."
            )
