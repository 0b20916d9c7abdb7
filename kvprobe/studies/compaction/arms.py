"""The arms of the study: a full factorial of provenance × position mode × delimiters, each a policy."""

from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from typing import get_args

from kvprobe.cache.cache import PositionMode
from kvprobe.policies.mask_spans import Delimiters, MaskSpans
from kvprobe.policies.policy import Provenance

HIDDEN_SEGMENTS = ("T1", "T2")
MODES: tuple[PositionMode, ...] = ("gapped", "contiguous")


@dataclass(frozen=True)
class Arm:
    """One way to go on without the hidden turns."""

    provenance: Provenance
    mode: PositionMode
    delimiters: Delimiters

    @property
    def name(self) -> str:
        return f"{self.provenance}, {self.mode}, delimiters {self.delimiters}"

    @property
    def policy(self) -> MaskSpans:
        return MaskSpans(HIDDEN_SEGMENTS, self.delimiters, mode=self.mode, provenance=self.provenance)

    def sign(self, effect: str) -> int:
        """On which side of a contrast it stands: 1 or -1."""
        high = {
            "provenance": self.provenance == "retained",
            "positions": self.mode == "gapped",
            "delimiters": self.delimiters == "kept",
        }
        return prod(1 if high[factor] else -1 for factor in effect.split(JOINED))


ARMS = tuple(Arm(*levels) for levels in product(get_args(Provenance), MODES, get_args(Delimiters)))
RETAINED = tuple(arm for arm in ARMS if arm.provenance == "retained")
RECOMPUTED = tuple(arm for arm in ARMS if arm.provenance == "recomputed")
MASK, RESTART = (
    next(arm for arm in arms if (arm.mode, arm.delimiters) == ("gapped", "dropped")) for arms in (RETAINED, RECOMPUTED)
)
"""The pair that differs in provenance alone."""

FACTORS = ("provenance", "positions", "delimiters")
JOINED = " × "
EFFECTS = tuple(JOINED.join(factors) for size in (1, 2, 3) for factors in combinations(FACTORS, size))
"""Main effects, then interactions. For one factor, the mean of the arms at its high level less that of the others; for
several, half the change of that difference from the low to the high level of each other."""
