"""Products in float32 on AMD's processors, of whose instructions MKL has only the oldest: oneDNN, which torch has on
board as well, takes half the time where they include AVX-512."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvprobe.restoring import restoring

FEWEST_NUMBERS = 1 << 16
"""In a weight; the product with a smaller one takes as long as the call."""


def cpu_name() -> str:
    """The name of the processor; empty where torch does not tell."""
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)
    return str(capabilities().get("cpu_name", ""))


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies faster than MKL here."""
    return (
        cpu_name().startswith("AMD")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def worth(weight: Tensor) -> bool:
    """Whether products with this weight are faster by oneDNN, where any are."""
    return weight.numel() >= FEWEST_NUMBERS and weight.device.type == "cpu" and weight.dtype == torch.float32


@contextmanager
def by_onednn(plain: nn.Module) -> Generator[None]:
    """While this lasts, oneDNN computes the large products of a model; results are the same but for rounding.

    A module whose `forward` was replaced is left alone, and so is a product that is to be differentiated.
    """
    modules = [
        module
        for module in plain.modules()
        if type(module) is nn.Linear and "forward" not in vars(module) and worth(module.weight)
    ]

    def undo() -> None:
        for module in modules:
            module.__dict__.pop("forward", None)

    with restoring(undo):
        for module in modules:
            module.__dict__["forward"] = partial(_product, module)
        yield


def _product(module: nn.Linear, x: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
    differs = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or x.dtype != torch.float32
    if differs or not x.numel() or type(module.weight) is not nn.Parameter:
        return nn.Linear.forward(module, x)
    return torch.ops.mkldnn._linear_pointwise(x, module.weight, module.bias, "none", [], "")
