"""What a report may say of a number, declared before the number is known."""

from dataclasses import dataclass

from kvprobe.stats import Estimate
from kvprobe.wording import verdict


@dataclass(frozen=True)
class Claim:
    """What a report may say of a finding, by the side of zero (or another value) on which its whole interval lies.

    In the three phrases `{value}` is the number with its interval, and `{task}` is the label of the key `task`.

    Attributes:
        finding: its name; its interval must hold together with those of all findings that it is chosen from.
        against: the value; 1 for a ratio.
        negligible: how far beyond it the interval must lie, where rounding alone can move numbers.
    """

    finding: str
    above: str
    below: str
    unclear: str = "not detected"
    against: float = 0.0
    negligible: float = 0.0

    def said(self, value: Estimate) -> str:
        """The phrase for this number."""
        return verdict(value, self.above, self.below, self.unclear, self.against, negligible=self.negligible)
