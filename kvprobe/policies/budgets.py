"""Unequal budgets: more slots for some layers (PyramidKV), or for some heads (Ada-KV), at the same total."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache import PositionLaw
from kvprobe.memory.slots import layer_counts
from kvprobe.policies.policy import Live, Provenance, Scene, Scored, highest


@dataclass(frozen=True)
class Rebudgeted(Scored):
    """Another policy's scores, total, law, provenance and pace; the total is to be shared out otherwise."""

    budget: int = field(init=False, repr=False)
    policy: Scored
    law: PositionLaw = field(init=False, repr=False, default="gapped")
    provenance: Provenance = field(init=False, repr=False, default="retained")
    every: int | None = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        if isinstance(self.policy, Rebudgeted):
            raise ValueError(
                f"{type(self).__name__} would not heed the shares of {self.policy}; give it the policy inside that one."
            )
        for name in ("budget", "law", "provenance", "every"):
            object.__setattr__(self, name, getattr(self.policy, name))
        super().__post_init__()

    @property
    def observes(self) -> int | None:
        return self.policy.observes

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        return self.policy.scores(scene)


@dataclass(frozen=True)
class LayerBudgets(Rebudgeted):
    """Another policy's scores, with budgets that fall linearly from the first layer to the last.

    Cai et al. 2024, "PyramidKV" (arXiv 2406.02069). Layer 0 keeps 1 + `slope` times the policy's budget, the last layer
    1 − `slope` times; the mean over layers is the policy's own. Where the first layers could not use their share, because
    there are not so many slots, the slope is less. `LayerBudgets(SnapKV(64))` is PyramidKV.
    """

    slope: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.slope < 1:
            raise ValueError(f"LayerBudgets has slope={self.slope}; it must be at least 0 and below 1.")

    def keep(self, scene: Scene) -> Live:
        # Row by row: what a row may keep must not depend on the rows beside it.
        rows = [self.counts(scene.cache.n_layers, most) for most in scene.live.sum(3).amax((0, 2)).tolist()]
        counts = torch.stack(rows, 1).to(scene.live.device)
        return highest(self.scores(scene), scene.live, counts[:, :, None].expand(scene.live.shape[:3]))

    def counts(self, layers: int, most: int) -> Int[Tensor, "layers"]:
        """Slots per layer, `most` at the most; they add up to `layers` times the budget (or all there are)."""
        counts = torch.tensor(layer_counts(layers, self.budget, most, self.slope))
        if int(counts.min()) < 1:
            raise ValueError(
                f"{self} would leave layer {int(counts.argmin())} without a single slot; raise its budget or lower its slope."
            )
        return counts


@dataclass(frozen=True)
class HeadBudgets(Rebudgeted):
    """Another policy's scores, with each layer's budget shared out between its heads by score.

    Feng et al. 2024, "Ada-KV" (arXiv 2407.11550). Every head keeps its best `floor` of the policy's budget (at least one
    slot); the rest of the layer's budget goes to the best slots of all its heads together.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError(f"HeadBudgets has floor={self.floor}; it must be 0 to 1.")

    def keep(self, scene: Scene) -> Live:
        scores, live = self.scores(scene), scene.live
        sure = highest(scores, live, max(1, int(self.floor * self.budget)))
        layers, batch, heads, slots = scores.shape

        def together(tensor: Tensor) -> Tensor:
            # Slot by slot and head by head within a slot, so that of equals the newer stays, whichever head it is in.
            return tensor.transpose(2, 3).reshape(layers, batch, 1, slots * heads)

        chosen = highest(together(scores.masked_fill(sure, torch.inf)), together(live), self.budget * heads)
        return chosen.view(layers, batch, slots, heads).transpose(2, 3)
