"""Zeroing values: slots that receive attention and contribute nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvprobe.arguments import AtLeastOne
from kvprobe.cache.indices import indices
from kvprobe.cache.slots import Evicts
from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene


@dataclass(frozen=True)
class ZeroValues(Policy):
    """Set V of the named segments to zero and leave K: the slots still receive attention and contribute nothing.

    Compared with `MaskSpans`, where that attention goes to other slots, this separates the effect of a slot's content
    from the effect of its presence. It saves no memory.
    """

    segments: str | tuple[str, ...]
    layers: Sequence[int] | None = None
    every: AtLeastOne | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.segments:
            raise UserError("ZeroValues names no segment; give at least one.")
        if self.provenance != "retained":
            raise UserError("ZeroValues writes values, which computing again would undo; give provenance='retained'.")

    @property
    def slot_count(self) -> Evicts:
        raise UserError("ZeroValues saves no memory: its slots stay, with values of zero; leave it out of the budget.")

    def keep(self, scene: Scene) -> Live:
        return torch.ones_like(scene.live)

    def act(self, scene: Scene) -> Scene:
        cache = scene.cache
        names = (self.segments,) if isinstance(self.segments, str) else self.segments
        zeroed = (cache.ledger.in_segments(names) & ~scene.complete[:, None])[:, None, :, None]
        layers = indices("layer", self.layers, cache.n_layers)
        values = tuple(
            tensor.masked_fill(zeroed, 0.0) if layer in layers and bool(zeroed.any()) else tensor
            for layer, tensor in enumerate(cache.values)
        )
        return super().act(scene.with_cache(cache.with_parts({"V": values})))
