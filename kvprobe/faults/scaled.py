"""Numbers read at a wrong scale."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck


@dataclass(frozen=True)
class Scaled(Fault):
    """Numbers times a factor.

    The state of a recurrent layer is linear in the values that its tokens wrote. So on all slots, with
    `Scope(parts="value")`, it is the state times that factor: a factor of 2 is a state that was added to itself.
    """

    factor: float

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return struck.of(part) * self.factor
