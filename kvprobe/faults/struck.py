"""The struck slots of one layer, and the protocol of what strikes them."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.scope import Part, Scope


@dataclass(frozen=True, eq=False)
class Struck:
    """The struck slots of one layer, one after the other, possibly of several rows and several heads of each.

    Attributes:
        rows: row of the batch.
        heads: KV head.
        slots: slot index.
        positions: position at which queries see the slot.
        keys: K of the slot, before the fault.
        values: V of the slot, before the fault.
        slots_in_row: slots of a row at this step.
        step: tokens read since the prompt.
        draws: source of the fault's random draws.
        context: the clean row, and what else the fault may use.
    """

    layer: int
    rows: Int[Tensor, "struck"]
    heads: Int[Tensor, "struck"]
    slots: Int[Tensor, "struck"]
    positions: Int[Tensor, "struck"]
    keys: Float[Tensor, "struck d_head"]
    values: Float[Tensor, "struck d_value"]
    slots_in_row: int
    step: int
    draws: Draws
    context: FaultContext

    def of(self, part: Part) -> Float[Tensor, "struck d"]:
        """What the slots hold, K or V."""
        return self.keys if part == "k" else self.values

    def noise(self, part: Part, purpose: int) -> Float[Tensor, "struck d"]:
        """Standard normal noise, a vector for each struck slot; it does not depend on which other slots are struck."""
        return self.chosen(self.drawn(part, purpose))

    def drawn(self, part: Part, purpose: int) -> Float[Tensor, "kv_heads slots d"]:
        """That noise for all slots, so that what is computed from it does not depend on which are struck."""
        shape = (self.context.cache.n_kv_heads, self.slots_in_row, self.of(part).shape[1])
        return self.draws.normal(shape, purpose, self.step, self.layer, int(part == "v")).to(self.keys.device)

    def uniform(self, purpose: int, width: int = 1, part: Part | None = None) -> Float[Tensor, "struck width"]:
        """`width` numbers from 0 to 1 for each struck slot; the same for K and V unless a part is named."""
        shape = (self.context.cache.n_kv_heads, self.slots_in_row, width)
        drawn = self.draws.uniform(shape, purpose, self.step, self.layer, *([] if part is None else [int(part == "v")]))
        return self.chosen(drawn.to(self.keys.device))

    def chosen(self, vectors: Float[Tensor, "kv_heads slots width"]) -> Float[Tensor, "struck width"]:
        """The vectors of the struck slots, from a tensor over all heads and slots."""
        return vectors.reshape(-1, vectors.shape[2]).index_select(0, self.heads * vectors.shape[1] + self.slots)


@runtime_checkable
class Strikes(Protocol):
    """What `kvprobe.faults.strike` needs of a fault; `kvprobe.faults.fault.Fault` documents each member."""

    @property
    def scope(self) -> Scope: ...

    @property
    def operator(self) -> "Strikes": ...

    def reaches(self, layer: int) -> bool: ...

    def refuse_unfit(self, context: FaultContext) -> None: ...

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]: ...
