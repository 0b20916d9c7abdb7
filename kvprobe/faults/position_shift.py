"""Keys at wrong positions."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import Distance
from kvprobe.cache.rotary import Rotation
from kvprobe.errors import UserError
from kvprobe.faults.fault import Fault, Need
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck


@dataclass(frozen=True)
class PositionShift(Fault):
    """Keys rotated as if their tokens stood `by` positions further on. Values and visibility stay.

    Source: llama.cpp #3825, where only the last of two shifts of the same slots was applied to their keys.
    """

    by: Distance

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("rotaries",)

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        if part == "v":
            return struck.values
        if part not in ("k", "rope"):
            raise UserError(f"PositionShift rotates K, or rope, and {part} is rotated otherwise or not at all.")
        if struck.context.rotaries is None:
            raise UserError(
                "PositionShift rotates keys, and this fault context has no rotary frequencies; let Model.sweep find "
                "them."
            )
        rotary = struck.context.rotaries[struck.layer]
        if rotary is None:
            return struck.of(part)
        positions = struck.positions[None]
        return Rotation.between(rotary, positions, positions + self.by).of(struck.of(part)[None, None])[0, 0]
