"""What a fault is: which slots it strikes × what it writes there × when, and whether the damage lasts.

A fault is a frozen dataclass. It computes the new content of a struck slot, for K and for V, and nothing else. Its
`Scope` decides which slots are struck, and `kvprobe.faults.strike` writes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastZero, check_fields, checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.faults.context import FaultContext
from kvprobe.faults.draws import Draws
from kvprobe.faults.scope import Part, Scope
from kvprobe.faults.strike import corrupt
from kvprobe.faults.struck import Struck
from kvprobe.names import short_repr

When = AtLeastZero | Literal["every"]
Need = Literal["rotaries", "queries"]


@dataclass(frozen=True)
class Fault(ABC):
    """A way to damage a cache.

    Attributes:
        scope: which slots are struck.
        at: before which token after the prompt. 0 is at once, so that the prompt's last token sees the damage; `every`
            is before each token.
        transient: whether only that one forward pass sees the damage. Else it stays, and a slot that is struck again is
            damaged further.
    """

    scope: Scope = field(default=Scope(), kw_only=True)
    at: When = field(default=0, kw_only=True)
    transient: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def needs(self) -> tuple[Need, ...]:
        """What the fault context must hold beside the cache."""
        return ()

    @property
    def lender(self) -> str | None:
        """The name of the donor from which it takes slots, if any."""
        return getattr(self, "donor", None)

    @property
    def operator(self) -> "Fault":
        """The fault without scope and time: what it does to a slot."""
        return replace(self, scope=Scope(), at=0, transient=False)

    def due(self, step: int) -> bool:
        """Whether it strikes before the token of this step."""
        return self.at in ("every", step)

    def reaches(self, layer: int) -> bool:
        """Whether it does anything at this layer."""
        return True

    def refuse_unfit(self, context: FaultContext) -> None:  # noqa: B027 - most faults fit every context
        """Refuse a fault context that does not fit this fault.

        Raises:
            UserError: it does not fit.
        """

    @abstractmethod
    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        """The new content of the struck slots, K or V.

        Raises:
            UserError: the fault context lacks what this fault needs (a donor, rotary frequencies, queries).
        """

    @checked_arguments
    def corrupt(
        self, cache: KVCache, draws: Sequence[Draws] | None = None, contexts: Sequence[FaultContext] | None = None
    ) -> KVCache:
        """The cache with this fault written into it; see `KVCache.corrupt`."""
        if draws is None:
            draws = [Draws(sample=row) for row in range(cache.batch)]
        if contexts is None:
            contexts = [FaultContext(cache.rows([row])) for row in range(cache.batch)]
        return corrupt(cache, self, contexts, draws)[0]

    def __str__(self) -> str:
        return short_repr(self)
