"""The arms of the study: a full factorial of provenance × position mode × delimiters, each a policy."""

from dataclasses import dataclass
from itertools import product
from typing import get_args

from kvprobe.cache.cache import PositionMode
from kvprobe.policies.mask_spans import Delimiters, MaskSpans
from kvprobe.policies.policy import Provenance
from kvprobe.studies.compaction.factorial import effects_of

HIDDEN_SEGMENTS = ("T1", "T2")
MODES: tuple[PositionMode, ...] = ("gapped", "contiguous")
FACTORS = ("provenance", "positions", "delimiters")


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

    @property
    def high(self) -> dict[str, bool]:
        """Whether it is at the high level of each factor."""
        levels = (self.provenance == "retained", self.mode == "gapped", self.delimiters == "kept")
        return dict(zip(FACTORS, levels, strict=True))


ARMS = tuple(Arm(*levels) for levels in product(get_args(Provenance), MODES, get_args(Delimiters)))
RETAINED = tuple(arm for arm in ARMS if arm.provenance == "retained")
RECOMPUTED = tuple(arm for arm in ARMS if arm.provenance == "recomputed")
MASK, RESTART = (
    next(arm for arm in arms if (arm.mode, arm.delimiters) == ("gapped", "dropped")) for arms in (RETAINED, RECOMPUTED)
)
"""The pair that differs in provenance alone."""

EFFECTS = effects_of(FACTORS)
