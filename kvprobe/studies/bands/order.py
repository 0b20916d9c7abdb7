"""Order: things from the largest mean to the smallest, and which of them differ significantly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvprobe.stats import Estimate

Verdict = Literal["yes", "no", "open"]


@dataclass(frozen=True)
class Ranking:
    """Things by their means.

    Attributes:
        names: the largest mean first.
        differences: of each two, in either direction, the first less the second; intervals that hold together.
    """

    names: tuple[str, ...]
    differences: Mapping[tuple[str, str], Estimate]

    @classmethod
    def of(
        cls, means: Mapping[str, Estimate | None], differences: Mapping[tuple[str, str], Estimate | None]
    ) -> "Ranking | None":
        """The order of these means; None where a mean or a difference is missing."""
        known = {name: mean.mean for name, mean in means.items() if mean is not None}
        known_differences = {pair: difference for pair, difference in differences.items() if difference is not None}
        if len(known) < len(means) or len(known_differences) < len(differences):
            return None
        return cls(tuple(sorted(known, key=lambda name: -known[name])), known_differences)

    @property
    def apart(self) -> list[bool]:
        """Whether each is significantly larger than the next one."""
        return [self.beyond(more, less) for more, less in pairwise(self.names)]

    def beyond(self, more: str, less: str) -> bool:
        """Whether one is significantly larger than another."""
        pair = self.differences.get((more, less))
        return pair.above() if pair is not None else self.differences[less, more].below()

    def largest(self, name: str) -> Verdict:
        """`yes`: significantly larger than all others; `no`: another is significantly larger; `open`: neither, or it is
        not among them."""
        return self._extreme(name, self.beyond)

    def smallest(self, name: str) -> Verdict:
        """As `largest`, of the smallest."""
        return self._extreme(name, lambda one, other: self.beyond(other, one))

    def _extreme(self, name: str, beyond: Callable[[str, str], bool]) -> Verdict:
        others = [other for other in self.names if other != name]
        if name not in self.names:
            return "open"
        if any(beyond(other, name) for other in others):
            return "no"
        return "yes" if all(beyond(name, other) for other in others) else "open"
