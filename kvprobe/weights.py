"""The weights of a model, wherever they are: in memory, made of other tensors where they are quantised, or on disk
until a module needs them."""

from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def offloaded(module: nn.Module) -> Any:
    """Where accelerate finds a module's own weights, by name, whenever it runs; None where it holds them."""
    reader = _reader(module)
    return reader and reader.weights_map


def hold_added(model: nn.Module) -> None:
    """Let modules whose weights are read from elsewhere find there, too, the parameters that were added to them.

    They were made to be like the others, and so without numbers, where TransformerLens adds zeros.
    """
    for module in model.modules():
        reader = _reader(module)
        if reader is not None:
            names = {name for name, _ in module.named_parameters(recurse=False)}
            added = {
                name: torch.zeros_like(module.get_parameter(name), device=reader.execution_device)
                for name in names
                if name not in reader.weights_map
            }
            reader.weights_map = ChainMap(added, reader.weights_map)


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of accelerate that a module has, one by one."""

    hook: Any = vars(module).get("_hf_hook")  # faster than getattr, and asked of every module at every reading
    return [] if hook is None else _single(hook)


def _single(hook: Any) -> list[Any]:
    """A hook, or those that it calls in sequence, of which each may be several again."""
    held = getattr(hook, "hooks", None)
    return [hook] if held is None else [one for some in held for one in _single(some)]


def _reader(module: nn.Module) -> Any:
    """The hook that reads a module's weights whenever it runs."""
    return next((hook for hook in hooks_of(module) if getattr(hook, "offload", False)), None)


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its tokens and gives its logits, which is not where weights are that are read from disk."""
    device = next((hook.execution_device for hook in hooks_of(model)), None)
    if device is None:
        return next(model.parameters()).device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def state(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model's state by name, in the order of the names; of those on disk, one is in memory at once."""
    for name, tensor in sorted(model.state_dict().items()):
        path, _, part = name.rpartition(".")
        held = offloaded(model.get_submodule(path)) if tensor.is_meta else None
        yield name, tensor if held is None else held[part].to(tensor.dtype)


def bytes_in_memory(model: nn.Module) -> int:
    """Bytes of the weights that are in memory at once: those that stay there, and of those on disk the largest module's
    own, which is there while it runs."""
    held, passing = dict[int, int](), 0
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        for piece in (piece for weight in own if not weight.is_meta for piece in pieces(weight.detach())):
            held[piece.untyped_storage().data_ptr()] = piece.untyped_storage().nbytes()
        passing = max(passing, sum(weight.nbytes for weight in own if weight.is_meta))
    return sum(held.values()) + passing


def pieces(tensor: Tensor) -> list[Tensor]:
    """The tensors that a quantised one is made of; others as they are."""
    parts: Any = getattr(tensor, "__tensor_flatten__", None)
    return [tensor] if parts is None else [piece for name in parts()[0] for piece in pieces(getattr(tensor, name))]


def rebuilt(tensor: Any, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A quantised tensor made of changed ones; others changed."""
    parts: Any = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        return change(tensor)
    names, settings = parts()
    changed = {name: rebuilt(getattr(tensor, name), change) for name in names}
    return type(tensor).__tensor_unflatten__(changed, settings, tensor.size(), tensor.stride())


def weight_of(module: Any) -> Tensor:
    """The weight of a module as floats in memory."""
    held = offloaded(module)
    if held is not None:
        return held["weight"].to(module.weight.dtype)
    weight: Any = module.weight.detach()
    return weight if pieces(weight)[0] is weight else weight.dequantize()
