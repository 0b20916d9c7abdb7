"""What a pair of sound caches may differ by, from who computed them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.floors import Computed, NoiseFloor, floor_between
from kvprobe.cache.stored import StoredCache
from kvprobe.errors import UserError

_STEPS: Mapping[Computed, float] = {
    "float32": 2**-23,
    "llama.cpp f32": 2**-23,
    "float16": 2**-10,
    "llama.cpp f16": 2**-10,
    "bfloat16": 2**-7,
    "llama.cpp q8_0": 2**-7,
    "llama.cpp q4_0": 2**-3,
}
_ONE_PRODUCT, _NEWBORN = 1e-6, 5e-6


@dataclass(frozen=True)
class Floor:
    """What a pair of sound caches may differ by.

    Attributes:
        measured: what such pairs were measured to have.
        step: between neighbouring numbers in the coarser of the two precisions, relative.
        slots: of the caches.
    """

    measured: NoiseFloor
    step: float
    slots: int

    @property
    def name(self) -> str:
        """How the two were computed, as far as their numbers and files say."""
        return f"{self.measured.one} and {self.measured.other}"

    @property
    def single(self) -> float:
        """What one product of matrices may be off by."""
        return max(_ONE_PRODUCT, self.step / 2)

    @property
    def newborn(self) -> float:
        """What a slot may be off by in the first layer in which it differs at all."""
        return max(_NEWBORN, 4 * self.step)

    def of(self, part: str, depth: float) -> float:
        """The largest median of the distances of a part in a layer at this depth, from 0 to 1."""
        return max(self.single, self.measured.allowed(part, depth, self.slots, place="layer"))


def floor_of(one: KVCache | StoredCache, other: KVCache | StoredCache, slots: int) -> Floor:
    """What these two caches may differ by, from the precision of their numbers and from what files say of them."""
    made = computed_as(one), computed_as(other)
    if "llama.cpp q4_0" in made:
        raise UserError(
            "What is sound in a cache of llama.cpp in q4_0 was not measured; compare one in q8_0, f16 or f32."
        )
    return Floor(floor_between(*made), max(map(_STEPS.__getitem__, made)), max(1, slots))


def computed_as(cache: KVCache | StoredCache) -> Computed:
    """How a cache was computed: in the precision that its numbers have, whatever they are stored as now; or as the file
    of an engine says."""
    if isinstance(cache, StoredCache) and "llama.cpp" in cache.origin:
        types: Mapping[str, Computed] = {
            "f32": "llama.cpp f32",
            "f16": "llama.cpp f16",
            "q8_0": "llama.cpp q8_0",
            "q4_0": "llama.cpp q4_0",
        }
        found: list[Computed] = [types[name] for name in re.findall(r"\b(f32|f16|q8_0|q4_0)\b", cache.origin)]
        return max(found, key=lambda name: _STEPS[name]) if found else "llama.cpp f16"
    layer = next(layer for layer in cache.layers if layer)
    parts: list[Computed] = [_precision(tensor) for name, tensor in layer.items() if name != "decay"]
    return max(parts, key=_STEPS.__getitem__)


def _precision(tensor: Tensor) -> Computed:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return "bfloat16" if tensor.dtype == torch.bfloat16 else "float16"
    some = tensor.flatten(0, 2)[:: max(1, tensor[..., 0].numel() // 256)].float()
    if bool((some.bfloat16().float() == some).all()) and bool(some.any()):
        return "bfloat16"
    return "float16" if bool((some.half().float() == some).all()) and bool(some.any()) else "float32"
