"""The struck slots of one layer, and the protocol of what strikes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.scope import Part, Scope, purpose_of, stored_name


@dataclass(frozen=True, eq=False)
class Struck:
    """The struck slots of one layer, one after the other, possibly of several rows and several heads of each.

    Attributes:
        rows: row of the batch.
        heads: KV head, or head of the part.
        slots: slot index.
        positions: position at which queries see the slot.
        held: what the slots hold before the fault, K and V or another part.
        n_heads: of the layer, or of the part.
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
    held: Mapping[Part, Float[Tensor, "struck _"]]
    n_heads: int
    slots_in_row: int
    step: int
    draws: Draws
    context: FaultContext

    def of(self, part: Part) -> Float[Tensor, "struck d"]:
        """What the slots hold of a part.

        Raises:
            UserError: the fault strikes another.
        """
        if part not in self.held:
            others = " and ".join(map(stored_name, self.held))
            raise UserError(f"This fault needs {stored_name(part)}, and strikes {others}; strike K and V with it.")
        return self.held[part]

    @property
    def keys(self) -> Float[Tensor, "struck d_head"]:
        """K of the slots; raises as `of` does."""
        return self.of("k")

    @property
    def values(self) -> Float[Tensor, "struck d_value"]:
        """V of the slots; raises as `of` does."""
        return self.of("v")

    def noise(self, part: Part, purpose: int) -> Float[Tensor, "struck d"]:
        """Standard normal noise, a vector for each struck slot; it does not depend on which other slots are struck."""
        return self.chosen(self.drawn(part, purpose))

    def drawn(self, part: Part, purpose: int) -> Float[Tensor, "kv_heads slots d"]:
        """That noise for all slots, so that what is computed from it does not depend on which are struck."""
        shape = (self.n_heads, self.slots_in_row, self.of(part).shape[1])
        return self.draws.normal(shape, purpose, self.step, self.layer, purpose_of(part)).to(self.heads.device)

    def uniform(self, purpose: int, width: int = 1, part: Part | None = None) -> Float[Tensor, "struck width"]:
        """`width` numbers from 0 to 1 for each struck slot; the same for K and V unless a part is named."""
        shape, own = (self.n_heads, self.slots_in_row, width), [] if part is None else [purpose_of(part)]
        drawn = self.draws.uniform(shape, purpose, self.step, self.layer, *own)
        return self.chosen(drawn.to(self.heads.device))

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
