"""The struck slots of one layer, and what strikes them."""

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
        rows: of the batch.
        heads: KV heads.
        slots: indices.
        positions: at which the slots are seen.
        keys: what they hold.
        values: what they hold.
        slots_in_row: how many slots a row has by now.
        step: tokens read since the prompt.
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
        """Standard normal noise, a vector for each slot; it depends on layer, head and slot, not on what else is struck."""
        return self.chosen(self.drawn(part, purpose))

    def drawn(self, part: Part, purpose: int) -> Float[Tensor, "kv_heads slots d"]:
        """That noise for all slots, struck or not: what is computed from it does not depend on how many are struck."""
        shape = (self.context.cache.n_kv_heads, self.slots_in_row, self.of(part).shape[1])
        return self.draws.normal(shape, purpose, self.step, self.layer, int(part == "v")).to(self.keys.device)

    def lots(self, purpose: int, width: int = 1, part: Part | None = None) -> Float[Tensor, "struck width"]:
        """Lots from 0 to 1, so many for each slot; the same for K and V unless a part is named."""
        shape = (self.context.cache.n_kv_heads, self.slots_in_row, width)
        drawn = self.draws.uniform(shape, purpose, self.step, self.layer, *([] if part is None else [int(part == "v")]))
        return self.chosen(drawn.to(self.keys.device))

    def chosen(self, every: Float[Tensor, "kv_heads slots width"]) -> Float[Tensor, "struck width"]:
        """What a tensor over all heads and slots holds for those that are struck."""
        return every.reshape(-1, every.shape[2]).index_select(0, self.heads * every.shape[1] + self.slots)


@runtime_checkable
class Strikes(Protocol):
    """What `kvprobe.faults.strike` needs of a fault; see `kvprobe.faults.fault.Fault` for what each of these is."""

    @property
    def scope(self) -> Scope: ...

    @property
    def operator(self) -> "Strikes": ...

    def reaches(self, layer: int) -> bool: ...

    def refuse_unfit(self, context: FaultContext) -> None: ...

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]: ...
