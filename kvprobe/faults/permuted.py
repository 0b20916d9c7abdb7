"""Slots that change places."""

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
    """The struck slots of each layer and head change places among each other; none stays where it was.

    K and V together this is a control: attention sums over a set, and keys carry their positions, so nothing may change
    where all slots are visible. K or V alone (`Scope(parts="k")`) it pairs keys with the values of other tokens, as
    a K and V layout that is read as another does (LMCache #4463).
    """

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        group = struck.rows * struck.context.cache.n_kv_heads + struck.heads
        return struck.of(part)[following(group, struck.lots(_ORDER)[:, 0])]
