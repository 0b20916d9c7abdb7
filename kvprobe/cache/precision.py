"""In which precision a cache was computed, by its numbers and by what its ledger says of them."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.computed import STEPS, Computed
from kvprobe.cache.layer import Layer
from kvprobe.cache.stored import AnyCache


def computed_as(cache: AnyCache) -> Computed:
    """How a cache was computed: in the precision that its numbers have, whatever they are stored as now, in the first
    layer or, where it is finer, the last; or by the engine that its ledger names."""
    if cache.ledger.engine is not None:
        return cache.ledger.engine
    both = (cache.layers, reversed(cache.layers))
    ends: list[Computed] = [coarsest for layers in both if (coarsest := _coarsest(layers))]
    return min(ends, key=STEPS.__getitem__) if ends else "float32"


def in_fp8(cache: AnyCache) -> bool:
    """Whether numbers have at most 4 significant bits, as those of fp8 do at a scale of 1."""
    parts = map(_some, _first_parts(cache.layers))
    mantissas = [16 * torch.frexp(some)[0] for some in parts if len(some)]
    return any(_mostly(some == some.round()) for some in mantissas)


def _coarsest(layers: Iterable[Layer]) -> Computed | None:
    parts: list[Computed] = [precision for tensor in _first_parts(layers) if (precision := _precision(tensor))]
    return max(parts, key=STEPS.__getitem__) if parts else None


def _first_parts(layers: Iterable[Layer]) -> list[Tensor]:
    layer = next(layer for layer in layers if layer)
    return [tensor for name, tensor in layer.items() if name != "decay"]


def _some(tensor: Tensor) -> Float[Tensor, "numbers"]:
    """Numbers that say something: damage may have left zeros and NaN."""
    some = tensor.flatten(0, 2)[:: max(1, tensor[..., 0].numel() // 256)].float()
    return some[(some != 0) & some.isfinite()]


def _precision(tensor: Tensor) -> Computed | None:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return "bfloat16" if tensor.dtype == torch.bfloat16 else "float16"
    some = _some(tensor)
    if not len(some):
        return None
    if _mostly(some.bfloat16().float() == some):
        return "bfloat16"
    return "float16" if _mostly(some.half().float() == some) else "float32"


def _mostly(fitting: Bool[Tensor, "numbers"]) -> bool:
    """Whether nearly all numbers fit; some slots may be damaged."""
    return float(fitting.float().mean()) > 0.9
