"""The arms of the study: a full factorial of provenance × position mode × delimiters, each a policy."""

from dataclasses import dataclass
from itertools import product
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
    def levels(self) -> dict[str, str]:
        """The level of each of `FACTORS`."""
        return {"provenance": self.provenance, "law": self.mode, "delimiters": self.delimiters}

    @property
    def policy(self) -> MaskSpans:
        return MaskSpans(HIDDEN_SEGMENTS, self.delimiters, mode=self.mode, provenance=self.provenance)


ARMS = tuple(Arm(*levels) for levels in product(get_args(Provenance), MODES, get_args(Delimiters)))
RETAINED = tuple(arm for arm in ARMS if arm.provenance == "retained")
RECOMPUTED = tuple(arm for arm in ARMS if arm.provenance == "recomputed")
MASK, RESTART = (
    next(arm for arm in arms if (arm.mode, arm.delimiters) == ("gapped", "dropped")) for arms in (RETAINED, RECOMPUTED)
)
"""The pair that differs in provenance alone."""

FACTORS = {
    "provenance": ("recomputed", "retained"),
    "law": ("contiguous", "gapped"),
    "delimiters": ("dropped", "kept"),
}
"""Each factor, as metrics.json calls it, with its low and its high level."""

CONTRASTS = tuple(
    tuple(name for name, chosen in zip(FACTORS, bits, strict=True) if chosen)
    for bits in sorted(product((0, 1), repeat=len(FACTORS)), key=lambda bits: (sum(bits), tuple(-bit for bit in bits)))
    if any(bits)
)
"""Main effects, then interactions, as tuples of factor names."""


def contrast(factors: tuple[str, ...]) -> list[float]:
    """Coefficients over `ARMS`: for one factor, the mean at its high level less the mean at its low; for several, half
    the change of that difference from the low to the high level of each other."""
    coefficients = []
    for arm in ARMS:
        sign = 1
        for name in factors:
            sign *= 1 if arm.levels[name] == FACTORS[name][1] else -1
        coefficients.append(2 * sign / len(ARMS))
    return coefficients
