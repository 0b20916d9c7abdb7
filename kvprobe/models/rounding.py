"""How far two computations of one thing may lie apart: by rounding, and by how much of it a model does."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from kvprobe.models.geometry import embedded_tokens
from kvprobe.models.hooks import hooked


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
    return spread[None].to(next(plain.parameters()).device)


def rounding_of(plain: PreTrainedModel, read: Callable[[], Tensor]) -> float:
    """How far the logits that `read` gives move if what each module computes is off by the last bit of its dtype."""
    generator = torch.Generator(next(plain.parameters()).device).manual_seed(0)

    def disturb(module: object, args: object, output: object) -> object:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        noise = 2 * torch.rand(output.shape, generator=generator, device=output.device) - 1
        return (output.float() * (1 + torch.finfo(output.dtype).eps * noise)).to(output.dtype)

    leaves = [module for module in plain.modules() if not any(True for _ in module.children())]
    with torch.no_grad():
        quiet = read()
        with hooked((leaf, "output", disturb) for leaf in leaves):
            return difference(read(), quiet)
