"""What a fault is: which slots it strikes × what it writes there × when, and whether the damage lasts.

A fault is a frozen dataclass; it says what a struck slot holds afterwards, for K and for V, and nothing else. Which slots
those are is the `Scope`'s affair, and `kvprobe.faults.strike` writes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.faults.draws import Draws
from kvprobe.faults.host import Host
from kvprobe.faults.scope import Part, Scope
from kvprobe.faults.strike import corrupt
from kvprobe.faults.struck import Struck
from kvprobe.names import short_repr

When = int | Literal["every"]
Need = Literal["rotaries", "queries"]


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
            raise UserError(f"{type(self).__name__} has at={self.at!r}; it must be 'every', or a step from 0 on.")

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
            UserError: it cannot.
        """

    @abstractmethod
    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        """What the slots hold afterwards, K or V.

        Raises:
            UserError: the host lacks what this fault needs (a donor, rotary frequencies, queries).
        """

    def corrupt(
        self, cache: KVCache, draws: Sequence[Draws] | None = None, hosts: Sequence[Host] | None = None
    ) -> KVCache:
        """The cache with this fault written into it; see `KVCache.corrupt`."""
        rows = range(cache.batch)
        given = [Draws(sample=row) for row in rows] if draws is None else draws
        return corrupt(cache, self, [Host(cache.rows([row])) for row in rows] if hosts is None else hosts, given)[0]

    def __str__(self) -> str:
        return short_repr(self)
