"""The logical view: the bytes that a query may read, each number at its width, without what an engine adds."""

from kvprobe.memory.caches import AttentionStore, LayerStore
from kvprobe.memory.request import Request


def held(layers: tuple[LayerStore, ...], request: Request) -> list[int]:
    """Bytes of each layer.

    The scales of a policy that rounds are counted, since they are part of the policy; those of a cache format are not,
    since they are part of the engine.
    """
    return [_layer(layer, number, len(layers), request) for number, layer in enumerate(layers)]


def _layer(layer: LayerStore, number: int, layers: int, request: Request) -> int:
    total = 0
    if layer.attention is not None:
        total += _attention(layer.attention, number, layers, request)
    if layer.state is not None:
        total += layer.state.nbytes(request.dtype)
    return total * request.batch


def _attention(attention: AttentionStore, number: int, layers: int, request: Request) -> int:
    if attention.crosses:
        return request.numbers.bytes(request.source * attention.numbers)
    kept = request.plan.kept(request.prompt, request.new, number, layers)
    slots = kept if attention.reach is None else min(kept, attention.reach)
    rounds = request.plan.rounds
    if rounds is None:
        return request.numbers.bytes(slots * attention.numbers)
    # The rounded slots are the oldest, and so the first to leave a window.
    coarse = max(0, rounds.coarse(request.prompt, request.new) - (kept - slots))
    fine = request.numbers.bytes((slots - coarse) * attention.numbers)
    d_key, d_value = attention.d_key, attention.d_value
    groups = -(-coarse // rounds.group)
    index = request.numbers.bytes(coarse * attention.d_index)
    return (
        fine
        + index
        + attention.kv_heads * (coarse * rounds.slot_bytes(d_key, d_value) + groups * rounds.group_bytes(d_key))
    )
