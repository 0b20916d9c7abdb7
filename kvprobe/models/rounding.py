"""How far two computations of one thing may lie apart: by rounding, and by how much of it a model does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprobe.models.adapters import LowRank, sharing
from kvprobe.models.geometry import embedded_tokens
from kvprobe.models.hooks import hooked
from kvprobe.weights import device_of, rebuilt


def difference(actual: Tensor, expected: Tensor) -> float:
    """The difference of two tensors, relative to the spread of the expected one; NaN counts as infinite."""
    if torch.equal(actual, expected):
        return 0.0
    expected = expected.double()
    spread = torch.dist(expected, expected.mean(-1, keepdim=True))
    relative = float(torch.dist(actual.double(), expected) / spread) if bool(spread > 0) else torch.inf
    return torch.inf if relative != relative else relative


def few_tokens(plain: PreTrainedModel, count: int = 12) -> Int[Tensor, "1 count"]:
    """The first of forty different tokens, spread over the vocabulary."""
    spread = (1 + torch.arange(count) * 7 % 40) * embedded_tokens(plain) // 41
    return spread[None].to(device_of(plain))


def rounding_of(plain: PreTrainedModel, read: Callable[[], Tensor], seed: int = 0) -> float:
    """How far the logits that `read` gives move if what each module computes is off by the last bit of its dtype."""
    generator = torch.Generator(device_of(plain)).manual_seed(seed)

    def disturb(module: object, args: object, output: object) -> object:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = 2 * torch.rand(output.shape, generator=generator, device=output.device) - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    leaves = [module for module in plain.modules() if all(isinstance(part, LowRank) for part in module.children())]
    with torch.no_grad():
        quiet = read()
        with hooked((leaf, "output", disturb) for leaf in leaves):
            return difference(read(), quiet)


def in_float32(plain: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model in half precision that computes in float32. It shares the weights, of which each module has
    its own in float32 while it computes, so that it takes next to no memory."""
    precise = sharing(plain)
    for module in precise.modules():
        inside = vars(module)
        inside["_buffers"].update({name: _widened(buffer) for name, buffer in inside["_buffers"].items()})
        if held := dict(inside["_parameters"]):
            module.register_forward_pre_hook(partial(_with_parameters, held, _widened))
            module.register_forward_hook(partial(_with_parameters, held, lambda same: same), always_call=True)
    return precise


def _with_parameters(
    held: dict[str, nn.Parameter | None], changed: Callable[[Any], Any], module: nn.Module, *_: object
) -> None:
    vars(module)["_parameters"].update({name: changed(parameter) for name, parameter in held.items()})


def _widened(tensor: Any) -> Any:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    if tensor.is_meta:  # what is read from disk takes its dtype
        return nn.Parameter(tensor.float(), requires_grad=False)
    return rebuilt(tensor.detach(), lambda piece: piece.float() if piece.is_floating_point() else piece)
