"""Flipped bits, exact in the dtype in which numbers are stored."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part, Scope
from kvprobe.faults.struck import Struck

Field = Literal["sign", "exponent", "mantissa"]
Stored = Literal["fp32", "bf16", "fp16"]

_WHICH_BIT = 53


@dataclass(frozen=True)
class BitLayout:
    """How a dtype lays out its bits, from the lowest: mantissa, exponent, sign."""

    dtype: torch.dtype
    view: torch.dtype
    mantissa: int
    exponent: int

    @property
    def bits(self) -> int:
        return self.mantissa + self.exponent + 1

    def field(self, name: Field) -> range:
        """The bits of a field, lowest first."""
        top = self.mantissa + self.exponent
        fields = {"mantissa": range(self.mantissa), "exponent": range(self.mantissa, top), "sign": range(top, top + 1)}
        return fields[name]

    def field_of(self, bit: int) -> Field:
        """The field that a bit belongs to."""
        return next(name for name in get_args(Field) if bit in self.field(name))


LAYOUTS: dict[str, BitLayout] = {
    "fp32": BitLayout(torch.float32, torch.int32, 23, 8),
    "bf16": BitLayout(torch.bfloat16, torch.int16, 7, 8),
    "fp16": BitLayout(torch.float16, torch.int16, 10, 5),
}


@dataclass(frozen=True)
class BitFlips(Fault):
    """One bit flipped in each struck number, as it is stored in memory.

    By default the scope draws single numbers; give it `unit="slot"` to strike all numbers of a slot. A flip may give
    NaN or infinity.

    Source: arXiv 2604.17249, on single flips in shared blocks of a prefix cache, which finds coherent but altered
    answers for 13 of the 16 bits of bfloat16.

    Attributes:
        dtype: in which the number is stored; the cache's own by default. A cache in float32 can simulate the other two:
            struck numbers are rounded to them first.
        bit: the flipped bit; 0 is the lowest of the mantissa.
        field: or, the field from which the bit of each number is drawn. If neither is given, it is drawn from all bits.
    """

    dtype: Stored | None = None
    bit: int | None = None
    field: Field | None = None
    scope: Scope = dataclasses.field(default=Scope(unit="number"), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bit is not None and self.field is not None:
            raise UserError(f"BitFlips has bit={self.bit} and field={self.field}; give a bit or a field.")
        self._refuse_bit(LAYOUTS[self.dtype or "fp32"])

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        numbers = struck.of(part)
        layout = next((layout for layout in LAYOUTS.values() if layout.dtype == numbers.dtype), None)
        if self.dtype is not None and numbers.dtype in (torch.float32, LAYOUTS[self.dtype].dtype):
            layout = LAYOUTS[self.dtype]
        elif self.dtype is not None or layout is None:
            raise UserError(
                f"{self} flips bits of {self.dtype}, which a cache in {numbers.dtype} cannot store; flip bits of that "
                "dtype, or make the cache in float32."
            )
        self._refuse_bit(layout)
        if self.bit is not None:
            bits = torch.full_like(numbers, self.bit, dtype=torch.long)
        else:
            choice = layout.field(self.field) if self.field is not None else range(layout.bits)
            bits = choice.start + (struck.uniform(_WHICH_BIT, numbers.shape[1], part) * len(choice)).long()
        return flipped(numbers.to(layout.dtype), bits).to(numbers.dtype)

    def _refuse_bit(self, layout: BitLayout) -> None:
        if self.bit is not None and not 0 <= self.bit < layout.bits:
            raise UserError(
                f"BitFlips has bit={self.bit}; in {layout.dtype}, give a bit from 0 to {layout.bits - 1}, or a field."
            )


def flipped(numbers: Float[Tensor, "*shape"], bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Each number with one of its bits inverted; a second flip of the same bit restores it."""
    layout = next(layout for layout in LAYOUTS.values() if layout.dtype == numbers.dtype)
    one = torch.ones_like(bits).bitwise_left_shift(bits)
    # The sign bit of an integer type is its most negative number.
    mask = torch.where(bits == layout.bits - 1, torch.iinfo(layout.view).min, one).to(layout.view)
    return numbers.contiguous().view(layout.view).bitwise_xor(mask).view(numbers.dtype)
