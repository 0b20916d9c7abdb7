"""In which precision a cache was computed, by its numbers, or by the engine that its ledger names."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.computed import STEPS, Computed
from kvprobe.cache.layer import Layer
from kvprobe.cache.stored import AnyCache

FP8 = 8
"""Mantissas of fp8, at most."""
_FEWEST = 16
"""Numbers of a vector by which its mantissas are counted; of so many in bfloat16 nearly all are different."""


def computed_as(cache: AnyCache) -> Computed:
    """How a cache was computed: in the precision that its numbers have, whatever they are stored as now, in the first
    layer or, where it is finer, the last; or by the engine that its ledger names."""
    if cache.ledger.engine is not None:
        return cache.ledger.engine
    both = (cache.layers, reversed(cache.layers))
    ends: list[Computed] = [coarsest for layers in both if (coarsest := _coarsest(layers))]
    return min(ends, key=STEPS.__getitem__) if ends else "float32"


def in_fp8(cache: AnyCache) -> bool:
    """Whether vectors of the first layer are of numbers as fp8 has them, at whatever scale of its own each vector has;
    no engine is known to have computed them."""
    return cache.ledger.engine is None and _of_fp8(cache.layers)


def all_in_fp8(cache: AnyCache) -> bool:
    """The same, and of the last layer, too: one layer that was rounded by mistake makes no cache in fp8."""
    return in_fp8(cache) and _of_fp8(reversed(cache.layers))


def mantissas(vectors: Float[Tensor, "vectors numbers"]) -> Int[Tensor, "vectors"]:
    """How many different mantissas, in 8 bits, the numbers of each vector have that are finite and not 0; 0 where these
    are too few to tell."""
    counts = (vectors != 0) & vectors.isfinite()
    steps = (256 * torch.frexp(vectors.abs().nan_to_num(1.0, 1.0).float())[0]).round().long() % 256
    seen = torch.zeros(len(vectors), 257, dtype=torch.bool, device=vectors.device)
    seen.scatter_(1, torch.where(counts, steps, 256), True)
    return seen[:, :256].sum(1).where(counts.sum(1) >= _FEWEST, 0)


def _coarsest(layers: Iterable[Layer]) -> Computed | None:
    parts: list[Computed] = [precision for tensor in _first_parts(layers) if (precision := _precision(tensor))]
    return max(parts, key=STEPS.__getitem__) if parts else None


def _of_fp8(layers: Iterable[Layer]) -> bool:
    counts = (mantissas(_long_enough(_vectors(tensor))) for tensor in _first_parts(layers))
    return any(len(known := count[count > 0]) > 0 and _mostly(known <= FP8) for count in counts)


def _first_parts(layers: Iterable[Layer]) -> list[Tensor]:
    layer = next(layer for layer in layers if layer)
    return [tensor for name, tensor in layer.items() if name != "decay"]


def _vectors(tensor: Tensor) -> Float[Tensor, "vectors numbers"]:
    """About 256 of them, evenly."""
    return tensor.flatten(0, 2)[:: max(1, tensor[..., 0].numel() // 256)].float()


def _long_enough(vectors: Float[Tensor, "vectors numbers"]) -> Float[Tensor, "joined more"]:
    """The same numbers, short vectors joined until their mantissas can be counted."""
    joined = -(-_FEWEST // vectors.shape[1])
    return vectors[: len(vectors) // joined * joined].reshape(-1, joined * vectors.shape[1])


def _some(tensor: Tensor) -> Float[Tensor, "numbers"]:
    """Numbers that say something: damage may have left zeros and NaN."""
    some = _vectors(tensor)
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
