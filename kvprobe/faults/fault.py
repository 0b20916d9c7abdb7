"""What a fault is: which slots it strikes × what it writes there × when, and whether the damage lasts.

A fault is a frozen dataclass; it says what a struck slot holds afterwards, for K and for V, and nothing else. Which slots
those are is the `Scope`'s affair, and `kvprobe.faults.strike` writes it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.described import described
from kvprobe.faults.draws import Draws
from kvprobe.faults.host import Host
from kvprobe.faults.scope import Part, Scope

When = int | Literal["every"]
Need = Literal["rotaries", "queries"]


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
    host: Host

    def of(self, part: Part) -> Float[Tensor, "struck d"]:
        """What the slots hold, K or V."""
        return self.keys if part == "k" else self.values

    def noise(self, part: Part, purpose: int) -> Float[Tensor, "struck d"]:
        """Standard normal noise, a vector for each slot; it depends on layer, head and slot, not on what else is struck."""
        return self.chosen(self.drawn(part, purpose))

    def drawn(self, part: Part, purpose: int) -> Float[Tensor, "kv_heads slots d"]:
        """That noise for all slots, struck or not: what is computed from it does not depend on how many are struck."""
        shape = (self.host.cache.n_kv_heads, self.slots_in_row, self.of(part).shape[1])
        return self.draws.normal(shape, purpose, self.step, self.layer, int(part == "v")).to(self.keys.device)

    def lots(self, purpose: int, width: int = 1, part: Part | None = None) -> Float[Tensor, "struck width"]:
        """Lots from 0 to 1, so many for each slot; the same for K and V unless a part is named."""
        shape = (self.host.cache.n_kv_heads, self.slots_in_row, width)
        drawn = self.draws.uniform(shape, purpose, self.step, self.layer, *([] if part is None else [int(part == "v")]))
        return self.chosen(drawn.to(self.keys.device))

    def chosen(self, every: Float[Tensor, "kv_heads slots width"]) -> Float[Tensor, "struck width"]:
        """What a tensor over all heads and slots holds for those that are struck."""
        return every.reshape(-1, every.shape[2]).index_select(0, self.heads * every.shape[1] + self.slots)


@dataclass(frozen=True)
class Fault(ABC):
    """A way to damage a cache.

    Attributes:
        scope: which slots are struck.
        at: before which token after the prompt: 0 is at once (the prompt's last token feels it), `every` before each.
        transient: whether only that one read sees the damage; else it is written, and what is struck again is damaged
            further.
    """

    scope: Scope = field(default=Scope(), kw_only=True)
    at: When = field(default=0, kw_only=True)
    transient: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.at != "every" and (not isinstance(self.at, int) or self.at < 0):
            raise ValueError(f"{type(self).__name__} has at={self.at!r}; it must be 'every', or a step from 0 on.")

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the host must have beside the cache."""
        return ()

    @property
    def lender(self) -> str | None:
        """The name of the donor that it takes slots from, if it takes any."""
        return getattr(self, "donor", None)

    @property
    def operator(self) -> "Fault":
        """The fault without its where and when: what it does to a slot."""
        return replace(self, scope=Scope(), at=0, transient=False)

    def due(self, step: int) -> bool:
        """Whether it strikes before the token of this step is read."""
        return self.at in ("every", step)

    def reaches(self, layer: int) -> bool:
        """Whether it does anything at this layer."""
        return True

    def refuse_unfit(self, host: Host) -> None:  # noqa: B027 - most faults fit every host
        """Refuse a host that this fault cannot strike.

        Raises:
            ValueError: it cannot.
        """

    @abstractmethod
    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        """What the slots hold afterwards, K or V.

        Raises:
            ValueError: the host lacks what this fault needs (a donor, rotary frequencies, queries).
        """

    def __str__(self) -> str:
        return described(self)
