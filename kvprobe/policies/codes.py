"""Quantised numbers in the layout of KIVI: keys per channel, values per token, a scale and a minimum for each group."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvprobe.cache.ledger import QuantisationFormat
from kvprobe.errors import UserError


@dataclass(frozen=True)
class Codes:
    """Quantised numbers: a code for each, and for each group a scale and a minimum that are exact in float16.

    A number differs from minimum + code × scale by at most half its group's scale.

    Attributes:
        codes: 0 to 2^bits − 1, shaped like the numbers; groups of values are an axis before the last.
        scale: broadcasts over `codes`.
        minimum: the smallest number of each group, or just below it.
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
            raise UserError(
                "The cache holds numbers beyond 65,504, which scales in float16 cannot represent; leave Quantise out."
            )
        codes = ((numbers - minimum) / scale.clamp(min=_SMALLEST_HALF)).round().clamp(0, 2**bits - 1)
        return cls(codes.to(torch.uint8), scale, minimum)

    def numbers(self) -> Float[Tensor, "kv_heads groups group d"]:
        """The numbers that the codes stand for, in fp32."""
        return (self.codes.float() * self.scale + self.minimum).flatten(3)


def codes_of_keys(keys: Float[Tensor, "kv_heads groups group d_head"], quantisation: QuantisationFormat) -> Codes:
    """Codes of keys: a scale for each channel, over the slots of a group."""
    return Codes.of(keys, quantisation.bits, axis=2)


def codes_of_values(values: Float[Tensor, "kv_heads groups group d_value"], quantisation: QuantisationFormat) -> Codes:
    """Codes of values: a scale for each slot and group of channels."""
    width = min(quantisation.group, values.shape[3])
    if values.shape[3] % width:
        raise UserError(
            f"Values of {values.shape[3]} numbers cannot be quantised in groups of {quantisation.group}; give a "
            "divisor."
        )
    return Codes.of(torch.unflatten(values, 3, (-1, width)), quantisation.bits, axis=4)


_SMALLEST_HALF = 2.0**-24


def _half_below(numbers: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """For each number one of float16, in fp32, that is not above it and at most two steps below it."""
    half = numbers.half().float()
    step = (numbers.abs() * 2.0**-10).clamp(min=_SMALLEST_HALF)
    return torch.where(half > numbers, (numbers - step).half().float(), half)
