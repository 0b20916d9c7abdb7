"""Restarting: seed 003's setup B, in its two forms. What stays is computed again and has never seen what went."""

from dataclasses import dataclass, field

from kvprobe.cache.cache import PositionMode
from kvprobe.policies.mask_spans import MaskSpans
from kvprobe.policies.policy import Provenance


@dataclass(frozen=True)
class RestartInPlace(MaskSpans):
    """Drop the segments and compute the rest again at the positions that they had: against `MaskSpans`, provenance
    alone has changed."""

    provenance: Provenance = field(default="recomputed", kw_only=True)


@dataclass(frozen=True)
class RestartRebuilt(MaskSpans):
    """Drop the segments and compute the rest again at positions from 0, as an engine does whose cache has expired."""

    mode: PositionMode = field(default="contiguous", kw_only=True)
    provenance: Provenance = field(default="recomputed", kw_only=True)
