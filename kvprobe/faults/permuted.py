"""Struck slots that exchange their contents."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.faults.fault import Fault
from kvprobe.faults.paged import following
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck

_ORDER = 43


@dataclass(frozen=True)
class Permuted(Fault):
    """The struck slots of each layer and head exchange their contents; each gets the content of another.

    With K and V together this is a control: attention sums over a set, and keys carry their positions, so nothing may
    change where all slots are visible. With K or V alone (`Scope(parts="k")`) keys meet the values of other tokens. The
    same happens when one layout of K and V is read as another (LMCache #4463).
    """

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        group = struck.rows * struck.n_heads + struck.heads
        return struck.of(part)[following(group, struck.uniform(_ORDER)[:, 0])]
