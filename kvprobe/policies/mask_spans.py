"""Masking named segments: seed 003's setup A, and what every compaction does to its history."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.policies.policy import Live, Policy, Scene

Delimiters = Literal["dropped", "kept"]


@dataclass(frozen=True)
class MaskSpans(Policy):
    """Drop the slots of named segments, with or without their chat delimiters; later slots stay as they were computed.

    Mask-and-continue (Memento, arXiv 2604.09852; seed 003): what stays has seen what goes. Segments that the cache does
    not hold are refused. Acts once: a segment that is gone stays gone.
    """

    segments: str | tuple[str, ...]
    delimiters: Delimiters = "dropped"
    every: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.segments:
            raise UserError(f"{type(self).__name__} names no segment; give at least one.")
        if self.delimiters not in get_args(Delimiters):
            raise UserError(unknown("treatment of delimiters", self.delimiters, get_args(Delimiters)))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.segments,) if isinstance(self.segments, str) else self.segments

    def keep(self, scene: Scene) -> Live:
        ledger = scene.cache.ledger
        gone = ledger.in_segments(self.names)
        if self.delimiters == "kept":
            gone = gone & ~ledger.delimiters
        return (~gone)[None, :, None, :].expand_as(scene.live)
