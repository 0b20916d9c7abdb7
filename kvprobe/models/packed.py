"""Products of many rows with weights that are packed once, where torch would pack them anew in every call.

On a CPU torch leaves products in float32 to MKL, which brings the weights into another order before it multiplies. For
the dozens of rows of a decode batch that costs more than the product itself on a processor without AVX-512, and on
AMD's, for which MKL has only its oldest instructions. oneDNN, which torch has on board, takes weights in its own order;
`benchmarks/packed.py` has what that gains.
"""

import multiprocessing
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvprobe.models.lanes import Lanes
from kvprobe.models.loading import free_bytes
from kvprobe.models.products import cpu_name
from kvprobe.models.unproved import Lane
from kvprobe.restoring import restoring

FEWEST_ROWS = 2
"""A single row takes as long as its weights take to be read from memory, in whatever order they are."""
FEWEST_STEPS = 64
"""Packing takes as long as a few steps save, and answers may end early."""
FEWEST_BYTES = 1 << 30
"""Of weights; models with fewer are fast enough as they are."""


def packed_if_faster(lanes: Lanes, lane: Lane, rows: int, steps: int) -> AbstractContextManager[None]:
    """`packed` for a batch of so many rows that is decoded for so many steps, where that saves time."""
    if lane != "plain" or not is_worth_packing(lanes.plain, rows, steps):
        return nullcontext()
    _ = lanes.masks_by_head  # the gate, if it has not been passed yet, proves the model with its own products
    return packed(lanes.plain, rows)


@contextmanager
def packed(plain: nn.Module, rows: int) -> Generator[None]:
    """The model multiplies with packed copies of its weights, which are made for batches of about `rows` rows.

    Results are the same but for rounding. A module whose `forward` was replaced is left alone. So is a product that is
    to be differentiated, and one with weights that were written meanwhile, other than in place through `.data`.
    """
    linear = [module for module in plain.modules() if type(module) is nn.Linear and "forward" not in vars(module)]

    def unpack() -> None:
        for module in linear:
            module.__dict__.pop("forward", None)

    with restoring(unpack):
        for module in linear:
            weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
            module.__dict__["forward"] = _Product(module, weight, _state(module))
        yield


def is_worth_packing(plain: nn.Module, rows: int, steps: int) -> bool:
    """Whether a batch takes less time with packed weights, and memory has room for them.

    Worker processes do not pack: each would see the same free memory.
    """
    weights = list(plain.parameters())
    size = sum(weight.nbytes for weight in weights)
    return (
        {(weight.device.type, weight.dtype) for weight in weights} == {("cpu", torch.float32)}
        and (torch.backends.cpu.get_cpu_capability() == "AVX2" or cpu_name().startswith("AMD"))
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and multiprocessing.parent_process() is None
        and rows >= FEWEST_ROWS
        and steps >= FEWEST_STEPS
        and FEWEST_BYTES <= size < free_bytes(weights[0].device) / 2
    )


@dataclass(frozen=True, eq=False)
class _Product:
    """What a module computes with a packed copy of its weight, and a copy of the module with its own.

    Attributes:
        state: of the weight when it was packed; see `_state`.
    """

    module: nn.Linear
    weight: Tensor
    state: tuple[int, int]

    def __call__(self, x: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
        few = x.shape[:-1].numel() < FEWEST_ROWS
        if few or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _state(self.module) != self.state:
            return nn.Linear.forward(self.module, x)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.module.bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[[Tensor], Tensor]:
        return partial(nn.Linear.forward, memo[id(self.module)])


def _state(module: nn.Linear) -> tuple[int, int]:
    """Where the weights are, and how often they were written."""
    return module.weight.data_ptr(), module.weight._version
