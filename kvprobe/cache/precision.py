"""In which precision a cache was computed, by its numbers, or by the engine that its ledger names."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.computed import COARSE, IN_DTYPES, STEPS, Computed, Dtype
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import attends
from kvprobe.cache.stored import AnyCache

Fp8Format = Literal["e4m3", "e5m2"]
FP8, E5M2 = 8, 4
"""Mantissas of fp8, at most; and of the coarser of the two."""
_INT4 = 8
"""Sizes of a vector's numbers of 4 bits, at most; these have as few mantissas as e5m2."""
_FEWEST = 16
"""Numbers of a vector by which its mantissas are counted; of so many in bfloat16 nearly all are different."""


def computed_as(cache: AnyCache) -> Computed:
    """How a cache was computed: in the precision that its numbers have, whatever they are stored as now, in the first
    layer or, where it is finer, the last; or by the engine that its ledger names, where it was measured in that
    precision."""
    engine = cache.ledger.engine
    if engine in COARSE:
        return engine
    both = (cache.layers, reversed(cache.layers))
    ends: list[Dtype] = [coarsest for layers in both if (coarsest := _coarsest(layers))]
    dtype: Dtype = min(ends, key=STEPS.__getitem__) if ends else "float32"
    return IN_DTYPES.get((engine, dtype), dtype)


def in_fp8(cache: AnyCache) -> bool:
    """Whether vectors of the first layers, up to one that attends, are of numbers as fp8 has them, at whatever scale of
    its own each vector has; no engine that rounds more than its numbers say is known to have computed them."""
    if cache.ledger.engine in COARSE:
        return False
    for layer in cache.layers:
        if any(_fp8(tensor) for name, tensor in layer.items() if name != "decay"):
            return True
        if attends(layer):
            return False
    return False


def fp8_parts(cache: AnyCache, parts: Sequence[Iterable[str]]) -> dict[str, Fp8Format]:
    """The parts that are in fp8, and in which: in both the first and the last layer that have them, since one layer
    that was rounded by mistake makes no cache in fp8.

    Args:
        parts: those of each layer.
    """
    if cache.ledger.engine in COARSE:
        return {}
    holding = {
        name: [number for number, names in enumerate(parts) if name in names]
        for name in sorted({*chain(*parts)} - {"decay"})
    }
    found: dict[str, set[Fp8Format | None]] = {name: set() for name in holding}
    for number in sorted({end for numbers in holding.values() for end in (numbers[0], numbers[-1])}):
        layer = cache.layers[number]
        for name, numbers in holding.items():
            if number in (numbers[0], numbers[-1]):
                found[name].add(_fp8(layer[name]) if name in layer else None)
    return {name: kind for name, kinds in found.items() if len(kinds) == 1 and (kind := kinds.pop())}


def mantissas(vectors: Float[Tensor, "vectors numbers"]) -> Int[Tensor, "vectors"]:
    """How many different mantissas, in 8 bits, the numbers of each vector have that are finite and not 0; 0 where these
    are too few to tell."""
    counts = (vectors != 0) & vectors.isfinite()
    steps = (256 * torch.frexp(vectors.abs().nan_to_num(1.0, 1.0).float())[0]).round().long() % 256
    seen = torch.zeros(len(vectors), 257, dtype=torch.bool, device=vectors.device)
    seen.scatter_(1, torch.where(counts, steps, 256), True)
    return seen[:, :256].sum(1).where(counts.sum(1) >= _FEWEST, 0)


def _coarsest(layers: Iterable[Layer]) -> Dtype | None:
    parts: list[Dtype] = [precision for tensor in _first_parts(layers) if (precision := _precision(tensor))]
    return max(parts, key=STEPS.__getitem__) if parts else None


def _fp8(tensor: Tensor) -> Fp8Format | None:
    """In which fp8 its vectors are; None where in neither."""
    vectors = _long_enough(_vectors(tensor))
    count = mantissas(vectors)
    known = count > 0
    if not bool(known.any()) or not _mostly(count[known] <= FP8):
        return None
    sizes = (vectors[known].abs().nan_to_num(0.0, 0.0).sort(-1).values.diff(dim=-1) != 0).sum(-1) + 1
    return "e5m2" if _mostly(count[known] <= E5M2) and float(sizes.float().mean()) > _INT4 else "e4m3"


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


def _precision(tensor: Tensor) -> Dtype | None:
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
