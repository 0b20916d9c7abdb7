"""Sliding window: the newest slots stay, which shows what recency alone is worth."""

from dataclasses import dataclass
from typing import ClassVar

from kvprobe.cache.slots import Evicts
from kvprobe.policies.policy import Live, Policy, Scene
from kvprobe.policies.ranking import age
from kvprobe.policies.share import Budget


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """Keep the last `window` live slots of each row, in all layers and heads alike.

    The window counts slots, not positions: after other evictions it still holds `window` of them. Slot 0, the sink,
    leaves by definition, so nothing warns of it. With `provenance="recomputed"` this is the sliding window with
    re-computation of Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453,
    figure 1c), which is exact and slow.
    """

    window: Budget

    in_slots: ClassVar[str] = "window"

    @property
    def slot_count(self) -> Evicts:
        return Evicts(self.slots, self.every)

    def keep(self, scene: Scene) -> Live:
        return age(scene.live) < self.slots
