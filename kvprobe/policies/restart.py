"""Restarting without named segments: the other slots are computed again and have never seen what was dropped."""

from dataclasses import dataclass, field

from kvprobe.cache.cache import PositionMode
from kvprobe.policies.mask_spans import MaskSpans
from kvprobe.policies.policy import Provenance


@dataclass(frozen=True)
class RestartInPlace(MaskSpans):
    """Drop the segments and compute the others again at their old positions.

    Setup B of the Goldberg/Papailiopoulos exchange on masking prefixes. It differs from `MaskSpans` in provenance
    alone.
    """

    provenance: Provenance = field(default="recomputed", kw_only=True)


@dataclass(frozen=True)
class RestartRebuilt(MaskSpans):
    """Drop the segments and compute the others again at positions from 0, as an engine does after its cache has
    expired.

    Setup B of the Goldberg/Papailiopoulos exchange on masking prefixes, as deployed.
    """

    mode: PositionMode = field(default="contiguous", kw_only=True)
    provenance: Provenance = field(default="recomputed", kw_only=True)
