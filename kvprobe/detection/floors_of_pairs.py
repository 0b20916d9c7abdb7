"""What benign pairs of caches were measured to differ by, by the coarser precision of the two."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.stored import StoredCache

Precision = Literal["fp32", "fp16", "bf16", "q8_0", "q4_0"]
_STEPS: Mapping[Precision, float] = {"fp32": 2**-23, "fp16": 2**-10, "bf16": 2**-7, "q8_0": 2**-7, "q4_0": 2**-3}
_MEDIANS: Mapping[Precision, float] = {"fp32": 5e-6, "fp16": 8e-3, "bf16": 5e-2, "q8_0": 5e-2, "q4_0": 0.15}
_ONE_PRODUCT, _NEWBORN = 1e-6, 5e-6
_OTHER_ENGINE = 0.1
"""Weights in 4 bits, as in most files of llama.cpp, and activations rounded to 8."""


@dataclass(frozen=True)
class Floor:
    """What a pair of sound caches may differ by.

    Attributes:
        name: of the pair, in words.
        median: of the relative distances of a layer's slots.
        step: between neighbouring numbers in the coarser of the two precisions, relative.
    """

    name: str
    median: float
    step: float

    @property
    def single(self) -> float:
        """What one product of matrices may be off by."""
        return max(_ONE_PRODUCT, self.step / 2)

    @property
    def newborn(self) -> float:
        """What a slot may be off by in the first layer in which it differs at all."""
        return max(_NEWBORN, 4 * self.step)

    def of(self, part: str) -> float:
        """The median that a part may have."""
        return self.median


def floor_of(one: KVCache | StoredCache, other: KVCache | StoredCache) -> Floor:
    """What these two caches may differ by, from the precision of their numbers and from what files say of them."""
    held: list[Precision] = [precision_of(cache) for cache in (one, other)]
    coarser = max(held, key=_MEDIANS.__getitem__)
    engines = [isinstance(cache, StoredCache) and "llama.cpp" in cache.origin for cache in (one, other)]
    median = _MEDIANS[coarser]
    if engines[0] != engines[1]:
        median = max(median, _OTHER_ENGINE)
    return Floor(f"{held[0]} and {held[1]}", median, _STEPS[coarser])


def precision_of(cache: KVCache | StoredCache) -> Precision:
    """In which precision the numbers of a cache are, whatever they are stored as now."""
    if isinstance(cache, StoredCache) and (named := re.search(r"q8_0|q4_0", cache.origin)):
        return "q4_0" if named[0] == "q4_0" else "q8_0"
    layer = next(layer for layer in cache.layers if layer)
    found: list[Precision] = [_precision(tensor) for name, tensor in layer.items() if name != "decay"]
    return max(found, key=_STEPS.__getitem__)


def _precision(tensor: Tensor) -> Precision:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return "bf16" if tensor.dtype == torch.bfloat16 else "fp16"
    some = tensor.flatten(0, 2)[:: max(1, tensor[..., 0].numel() // 256)].float()
    if bool((some.bfloat16().float() == some).all()) and bool(some.any()):
        return "bf16"
    return "fp16" if bool((some.half().float() == some).all()) and bool(some.any()) else "fp32"
