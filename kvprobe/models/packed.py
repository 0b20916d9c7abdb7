"""Products of many rows with weights that are packed once, where torch would pack them anew in every call.

On a CPU torch leaves products in float32 to MKL, which brings the weights into another order before it multiplies. For
the dozens of rows of a decode batch that costs more than the product itself on a processor without AVX-512. oneDNN,
which torch has on board, takes weights in its own order; `benchmarks/packed.py` has what that gains.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvprobe.models.loading import free_bytes
from kvprobe.models.unproved import UnprovedLanes

ROWS = 4
"""With fewer, the weights are read from memory as slowly as they are packed."""
STEPS = 64
"""Fewer are not worth the packing, which takes as long as about ten steps save."""
SMALLEST = 1 << 30
"""Bytes of weights; models with fewer are fast enough as they are."""


def packed_if_faster(lanes: UnprovedLanes, lane: str, rows: int, steps: int) -> AbstractContextManager[None]:
    """`packed` for a batch that is decoded, where that saves time."""
    faster = lane != "hooked" and is_worth_packing(lanes.plain, rows, steps)
    return packed(lanes.plain, rows) if faster else nullcontext()


@contextmanager
def packed(plain: nn.Module, rows: int) -> Generator[None]:
    """The model multiplies with packed copies of its weights, for batches of about `rows` rows.

    Results are the same but for rounding. Nothing is differentiated, and weights must not be written meanwhile.
    """
    linear = [module for module in plain.modules() if type(module) is nn.Linear]
    try:
        for module in linear:
            weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
            module.forward = partial(_product, weight, module.bias)
        yield
    finally:
        for module in linear:
            module.__dict__.pop("forward", None)


def is_worth_packing(plain: nn.Module, rows: int, steps: int) -> bool:
    """Whether this many steps of a decode batch take less time with packed weights, and memory has room for them."""
    weights = list(plain.parameters())
    size = sum(weight.nbytes for weight in weights)
    return (
        {(weight.device.type, weight.dtype) for weight in weights} == {("cpu", torch.float32)}
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
        and torch.backends.mkldnn.is_available()
        and rows >= ROWS
        and steps >= STEPS
        and SMALLEST <= size < free_bytes(weights[0].device) / 2
    )


def _product(weight: Tensor, bias: Tensor | None, x: Float[Tensor, "*rows inner"]) -> Float[Tensor, "*rows outer"]:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
