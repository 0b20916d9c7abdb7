"""Keys at wrong positions."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.rotary import Rotation
from kvprobe.errors import UserError
from kvprobe.faults.fault import Fault, Need
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck


@dataclass(frozen=True)
class PositionShift(Fault):
    """Keys turned as if their tokens stood `by` positions further on; values stay, and so does who may see whom.

    llama.cpp #3825: of two shifts of the same slots only the last was applied to their keys.
    """

    by: int

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("rotaries",)

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        if part == "v":
            return struck.values
        if struck.context.rotaries is None:
            raise UserError(
                "PositionShift turns keys, and this fault context has no rotary frequencies; let Model.sweep find them."
            )
        rotary = struck.context.rotaries[struck.layer]
        if rotary is None:
            return struck.keys
        at = struck.positions[None]
        return Rotation.between(rotary, at, at + self.by).of(struck.keys[None, None])[0, 0]
