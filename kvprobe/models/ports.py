"""Where a plain model computes its residual stream and what its layers add to it, found on a few tokens.

TransformerLens has a map of the architectures that it hooks. In others (latent attention, states) a block reads the
stream and returns it, and two of its modules, or one, give what the block adds: those whose outputs make up the
difference. A model of which that is not so has no such ports, and what they would show is refused.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kvprobe.models.hooks import Hook, bare, hooked
from kvprobe.models.lens import Family
from kvprobe.models.rounding import difference, few_tokens
from kvprobe.models.unproved import UnprovedLanes

Port = tuple[str, Literal["input", "output"]]
"""The path of a module of the plain model, and which end of it: what it reads, or what it computes."""
ENDS: tuple[Literal["input"], Literal["output"]] = ("input", "output")
Ports = dict[tuple[Family, int], Port]
_Seen = dict[Port, Tensor]


@bare()
def ports_of(lanes: UnprovedLanes) -> Ports:
    """The ports of each layer; without those that were not found.

    Raises:
        UserError: the model has no list of decoder layers.
    """
    whole: Any = lanes.plain  # transformers' annotation is incomplete
    paths: dict[nn.Module, str] = {module: path for path, module in whole.named_modules()}
    mixers = {*lanes.attention_modules, *lanes.recurrent_modules}
    parts = [[*block.children(), *mixers.intersection(block.modules())] for block in lanes.blocks]
    seen = _seen(lanes, dict.fromkeys([*lanes.blocks, *chain.from_iterable(parts)]), paths)
    streams: list[tuple[Port, Port]] = [((paths[block], "input"), (paths[block], "output")) for block in lanes.blocks]
    ports: Ports = {}
    for layer, (first, last) in enumerate(streams):
        goes_on = layer + 1 == len(streams) or _equal(lanes, seen.get(last), seen.get(streams[layer + 1][0]))
        if first not in seen or last not in seen or not goes_on:
            continue
        ports["resid_pre", layer], ports["resid_post", layer] = first, last
        own = {port: tensor for port, tensor in seen.items() if port[0].startswith(f"{first[0]}.")}
        mixes = layer in lanes.geometry.attending or layer in lanes.geometry.recurrent
        ports |= {(family, layer): port for family, port in _added(lanes, own, seen[first], seen[last], mixes)}
    return ports


def _added(
    lanes: UnprovedLanes, seen: _Seen, before: Tensor, after: Tensor, mixes: bool
) -> Iterator[tuple[Family, Port]]:
    """What the modules of a block add to the stream.

    Args:
        seen: in the order in which they are called.
        mixes: whether the block attends, or keeps a state.
    """
    outputs = [port for port in seen if port[1] == "output"]
    one_or_two: list[tuple[Port, ...]] = [*((port,) for port in outputs), *combinations(outputs, 2)]
    adding = _nearest(lanes, {ports: sum((seen[port] for port in ports), before) for ports in one_or_two}, after)
    families: list[Family] = ["attn_out", "mlp_out"] if len(adding) == 2 or mixes else ["mlp_out"]
    yield from zip(families, adding, strict=False)
    if len(adding) == 2:
        inputs = {(port,): tensor for port, tensor in seen.items() if port[1] == "input"}
        for port in _nearest(lanes, inputs, before + seen[adding[0]]):
            yield "resid_mid", port


def _seen(lanes: UnprovedLanes, modules: Collection[nn.Module], paths: dict[nn.Module, str]) -> _Seen:
    """What these modules read and compute of the stream's size, in the order in which they are called; without those
    that are called twice, such as a dropout after both blocks of a layer."""
    seen: dict[Port, list[Tensor]] = {}
    hooks: list[Hook] = []
    for module in modules:
        for end in ENDS:
            hooks.append((module, end, _noting(seen, (paths[module], end), lanes.geometry.d_model)))
    with hooked(hooks), torch.no_grad():
        lanes.native(few_tokens(lanes.plain))
    return {port: tensors[0] for port, tensors in seen.items() if len(tensors) == 1}


def _noting(seen: dict[Port, list[Tensor]], port: Port, d_model: int) -> Callable[..., None]:
    def note(module: nn.Module, args: Sequence[object], found: object) -> None:
        if port[1] == "input":
            found = args or cast(Mapping[str, object], found).get("hidden_states")
        tensor = cast(Sequence[object], found)[0] if isinstance(found, tuple) else found
        if isinstance(tensor, Tensor) and tensor.dim() == 3 and tensor.shape[2] == d_model:
            seen.setdefault(port, []).append(tensor)

    return note


def _nearest(lanes: UnprovedLanes, tensors: Mapping[tuple[Port, ...], Tensor], wanted: Tensor) -> tuple[Port, ...]:
    """The ports of the tensor that is the wanted one; of several that of the nearest, and of those as near the first.
    None where there is none."""
    alike = {ports: tensor for ports, tensor in tensors.items() if _equal(lanes, tensor, wanted)}
    return min(alike, key=lambda ports: difference(alike[ports], wanted), default=())


def _equal(lanes: UnprovedLanes, one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors differ by the rounding of a sum alone: that of the whole model is far more in half precision,
    and may hide what a block adds."""
    if one is None or other is None or one.shape != other.shape:
        return False
    return difference(one, other) <= min(lanes.tolerance(), max(1e-4, torch.finfo(other.dtype).eps / 2))
