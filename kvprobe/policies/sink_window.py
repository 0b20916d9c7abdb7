"""Attention sinks and a window (StreamingLLM)."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvprobe.arguments import AtLeastZero
from kvprobe.cache.cache import PositionMode
from kvprobe.cache.slots import Evicts
from kvprobe.policies.policy import Live, Policy, Scene
from kvprobe.policies.ranking import age, rank
from kvprobe.policies.share import Budget


@dataclass(frozen=True)
class SinkWindow(Policy):
    """Keep the first `sinks` live slots and the last `window`, and close the positions up.

    Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). Positions are those
    within the cache, so the position mode is contiguous by default. Keys are rotated from the positions at which they
    were computed, each time that they are read; the paper does the same by caching them before the rotary embedding.
    """

    sinks: AtLeastZero
    window: Budget
    mode: PositionMode = field(default="contiguous", kw_only=True)

    in_slots: ClassVar[str] = "window"

    @property
    def slot_count(self) -> Evicts:
        return Evicts(self.sinks + self.slots, self.every)

    def keep(self, scene: Scene) -> Live:
        return (rank(scene.live) < self.sinks) | (age(scene.live) < self.slots)
