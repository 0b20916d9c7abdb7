"""Masking named segments, as a compaction does with its history."""

from dataclasses import dataclass, field
from typing import Literal

from kvprobe.arguments import AtLeastOne
from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene

Delimiters = Literal["dropped", "kept"]


@dataclass(frozen=True)
class MaskSpans(Policy):
    """Drop the slots of named segments, with or without their chat delimiters; later slots stay as they were computed.

    Mask-and-continue: setup A of the Goldberg/Papailiopoulos exchange on masking prefixes, and "Memento" 2026 (arXiv
    2604.09852). The slots that stay were computed while the dropped ones were visible. Segments that the cache does not
    hold are refused. It acts once, after the prompt.
    """

    segments: str | tuple[str, ...]
    delimiters: Delimiters = "dropped"
    every: AtLeastOne | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.segments:
            raise UserError(f"{type(self).__name__} names no segment; give at least one.")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.segments,) if isinstance(self.segments, str) else self.segments

    def keep(self, scene: Scene) -> Live:
        ledger = scene.cache.ledger
        gone = ledger.in_segments(self.names)
        if self.delimiters == "kept":
            gone = gone & ~ledger.delimiters
        ledger.warn_of_sink(gone)
        return (~gone)[None, :, None, :].expand_as(scene.live)
