"""A quantised cache in the manner of KIVI: keys per channel, values per token, the newest slots at full precision."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import QuantisationFormat
from kvprobe.cache.slots import Rounds
from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene


@dataclass(frozen=True)
class Quantise(Policy):
    """Round old slots to `bits` per number: keys in groups of `group` slots per channel, values in groups of `group`
    channels per slot. The last `tail` live slots keep full precision.

    Liu et al. 2024, "KIVI" (arXiv 2402.02750). Each group stores a scale and a minimum in float16. Slots are quantised
    once, in whole groups, when `group` of them have left the tail, so the tail holds `tail` to `tail + group − 1` slots;
    KIVI lets values leave one by one. Keys are rounded as stored, after the rotary embedding; kvprobe holds the rounded
    numbers unpacked, `KVCache.footprint` says what they cost packed, and `Codes.pack` packs them.
    """

    bits: int
    group: int = 32
    tail: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("bits", 1, 8)
        self._whole("group", 1)
        self._whole("tail", 0)
        if self.provenance != "retained" or self.mode != "gapped":
            raise UserError("Quantise moves and recomputes nothing; put its mode and provenance on another policy.")

    @property
    def slot_count(self) -> Rounds:
        return Rounds(self.bits, self.group, self.tail, self.every)

    def keep(self, scene: Scene) -> Live:
        return torch.ones_like(scene.live)

    def act(self, scene: Scene) -> Scene:
        cache, quantisation = scene.cache, QuantisationFormat(self.bits, self.group)
        if cache.ledger.quantisation not in (None, quantisation):
            raise UserError(f"The cache was quantised at {cache.ledger.quantisation}; {self} cannot go on from there.")
        leaving = [self._leaving(cache, row) for row in range(cache.batch)]
        quantised = cache.ledger.quantised.clone()
        for row, slots in enumerate(leaving):
            if slots.numel():
                numbers = int(quantised[row].max()) + 1 + torch.arange(len(slots), device=slots.device)
                quantised[row, slots.flatten()] = numbers.repeat_interleave(self.group)

        def rounded(tensor: Tensor, codes_of: Callable[[Tensor, QuantisationFormat], Codes]) -> Tensor:
            if not any(slots.numel() for slots in leaving):
                return tensor
            # A copy of its own: rows of a fork share storage, and so do caches.
            written = tensor.clone(memory_format=torch.contiguous_format)
            for row, slots in enumerate(leaving):
                if slots.numel():
                    written[row][:, slots] = codes_of(tensor[row][:, slots], quantisation).numbers().to(tensor.dtype)
            return written

        keys = tuple(rounded(tensor, codes_of_keys) for tensor in cache.keys)
        values = tuple(rounded(tensor, codes_of_values) for tensor in cache.values)
        ledger = replace(cache.ledger, quantised=quantised, quantisation=quantisation)
        return scene.with_cache(replace(cache, keys=keys, values=values, ledger=ledger))

    def _leaving(self, cache: KVCache, row: int) -> Int[Tensor, "groups group"]:
        """Slots of this row that have left the tail and are not quantised yet, in whole groups."""
        live = cache.ledger.kept[row].nonzero()[:, 0]
        old = live[: max(0, len(live) - self.tail)]
        fine = old[cache.ledger.quantised[row, old] < 0]
        whole = len(fine) // self.group
        return fine[: whole * self.group].view(whole, self.group)


@dataclass(frozen=True)
class Codes:
    """Quantised numbers: a code each, and a scale and a minimum for each group, which float16 can hold.

    A number is off by at most half its group's scale from minimum + code × scale.

    Attributes:
        codes: 0 to 2^bits − 1, shaped like the numbers, groups of values spelt out as an axis before the last.
        scale: broadcasts over `codes`.
        minimum: of each group, or just below it.
    """

    codes: UInt8[Tensor, "kv_heads groups group *d"]
    scale: Float[Tensor, "kv_heads groups *_"]
    minimum: Float[Tensor, "kv_heads groups *_"]

    @classmethod
    def of(cls, numbers: Float[Tensor, "kv_heads groups group *d"], bits: int, axis: int) -> "Codes":
        """Codes of numbers that share a scale along `axis`.

        Raises:
            UserError: a number is too large for float16.
        """
        numbers = numbers.float()
        minimum = _half_below(numbers.amin(axis, keepdim=True))
        scale = -_half_below((minimum - numbers.amax(axis, keepdim=True)) / (2**bits - 1))
        if not bool(torch.isfinite(minimum).all() & torch.isfinite(scale).all()):
            raise UserError("The cache holds numbers beyond float16 (65,504), which its scales cannot reach.")
        codes = ((numbers - minimum) / scale.clamp(min=_SMALLEST_HALF)).round().clamp(0, 2**bits - 1)
        return cls(codes.to(torch.uint8), scale, minimum)

    def numbers(self) -> Float[Tensor, "kv_heads groups group d"]:
        """The numbers that the codes stand for, in fp32."""
        return (self.codes.float() * self.scale + self.minimum).flatten(3)

    def pack(self, bits: int) -> bytes:
        """As an engine holds them: each slot's codes without gaps, then scales and minima in float16."""
        vectors = self.codes.flatten(3).cpu().numpy()
        planes = np.unpackbits(vectors[..., None], axis=-1)[..., 8 - bits :]
        packed = np.packbits(planes.reshape(*vectors.shape[:3], -1), axis=-1)
        return b"".join(
            [packed.tobytes(), *(each.half().cpu().numpy().tobytes() for each in (self.scale, self.minimum))]
        )


def codes_of_keys(keys: Float[Tensor, "kv_heads groups group d_head"], quantisation: QuantisationFormat) -> Codes:
    """Per channel, over the slots of each group."""
    return Codes.of(keys, quantisation.bits, axis=2)


def codes_of_values(values: Float[Tensor, "kv_heads groups group d_value"], quantisation: QuantisationFormat) -> Codes:
    """Per slot, over groups of channels."""
    width = min(quantisation.group, values.shape[3])
    if values.shape[3] % width:
        raise UserError(
            f"Values of {values.shape[3]} numbers cannot be quantised in groups of {quantisation.group}; give a divisor."
        )
    return Codes.of(values.unflatten(3, (-1, width)), quantisation.bits, axis=4)


_SMALLEST_HALF = 2.0**-24


def _half_below(numbers: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """A number of float16, in fp32, that is not above each and at most two steps below it."""
    half = numbers.half().float()
    step = (numbers.abs() * 2.0**-10).clamp(min=_SMALLEST_HALF)
    return torch.where(half > numbers, (numbers - step).half().float(), half)
