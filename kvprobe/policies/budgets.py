"""Unequal budgets: more slots for some layers (PyramidKV), or for some heads (Ada-KV), at the same total."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import PositionMode
from kvprobe.cache.slots import Evicts
from kvprobe.checks import require_share
from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Provenance, Scene, Scored, highest


@dataclass(frozen=True)
class Rebudgeted(Scored):
    """Another policy's scores, total, mode, provenance and pace; the total is to be shared out otherwise."""

    budget: int = field(init=False, repr=False)
    policy: Scored
    mode: PositionMode = field(init=False, repr=False, default="gapped")
    provenance: Provenance = field(init=False, repr=False, default="retained")
    every: int | None = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        if isinstance(self.policy, Rebudgeted):
            raise UserError(
                f"{type(self).__name__} would not heed the shares of {self.policy}; give it the policy inside that one."
            )
        if not isinstance(self.policy, Scored):
            raise UserError(
                f"{type(self).__name__} shares out the budget of a policy that scores slots; {self.policy} has none."
            )
        for name in ("budget", "mode", "provenance", "every"):
            object.__setattr__(self, name, getattr(self.policy, name))
        super().__post_init__()

    @property
    def observes(self) -> int | None:
        return self.policy.observes

    @property
    def protected(self) -> int:
        return self.policy.protected

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        return self.policy.scores(scene)


@dataclass(frozen=True)
class LayerBudgets(Rebudgeted):
    """Another policy's scores, with budgets that fall in equal steps from the first layer to the last.

    Cai et al. 2024, "PyramidKV" (arXiv 2406.02069), by the arithmetic of its code (`PyramidKVCluster` in
    Zefan-Cai/KVCache-Factory): `LayerBudgets(SnapKV(64))` is PyramidKV. Of the slots that the policy chooses (its budget less
    its window, or what else it protects) the last layer keeps a share of 1/`beta`, rounded down, and the first layer so many
    that both together keep twice the policy's; `beta=1` is the same budget everywhere. Where a prompt is too short for the
    first layer's budget, the last layer's is larger. Where it is shorter than twice the slots to be chosen, all layers keep
    the same.

    The step from layer to layer is rounded down, as published, so a cache may hold up to (layers − 2)/2 slots a layer more
    than the policy's own budget. Three things differ from the published code. It asks for a window; here a layer for which
    no slot is left keeps one. It acts on the prompt only; a policy that goes on acting falls in steps for short prompts too,
    as Ada-KV's code for PyramidKV does. And the budgets of kvpress (`PyramidKVPress`) are another reading: not rounded down,
    and without the window on top.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("beta", 1)

    @property
    def slot_count(self) -> Evicts:
        return replace(self.policy.slot_count, beta=self.beta)

    def keep(self, scene: Scene) -> Live:
        # Row by row: what a row may keep must not depend on the rows beside it.
        lengths = scene.live.sum(3).amax((0, 2)).tolist()
        counts = torch.tensor([self.slot_count.layer_counts(scene.cache.n_layers, length) for length in lengths]).T
        counts = counts.to(scene.live.device)
        return highest(self.scores(scene), scene.live, counts[:, :, None].expand(scene.live.shape[:3]))


@dataclass(frozen=True)
class HeadBudgets(Rebudgeted):
    """Another policy's scores, with each layer's budget shared out between its heads by score.

    Feng et al. 2024, "Ada-KV" (arXiv 2407.11550), by the arithmetic of its code (`AdaptiveSnapKVCluster` in FFY0/AdaKV):
    `HeadBudgets(SnapKV(64))` is Ada-SnapKV. The slots that the policy protects, such as its window, stay in every head. The
    others of the layer are ranked together, and a head's number among the best, times 1 − `floor`, plus `floor` of an equal
    share, is what the head keeps. Both terms are rounded, so a layer may hold up to one and a half slots a head less than the
    budget, or half a slot more.

    What differs: scores are not normalised by head (an option there, off by default). A head for which no slot is left keeps
    one. Where an earlier act left a head fewer slots than its share, the other heads' best make up for it. In the paper, and
    in kvpress (`AdaKVPress`), `floor` instead guarantees each head its best slots and leaves the shares above it as they are;
    kvpress counts the window as part of them.
    """

    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("HeadBudgets", "floor", self.floor)

    @property
    def slot_count(self) -> Evicts:
        return replace(self.policy.slot_count, even=False)

    def keep(self, scene: Scene) -> Live:
        scores, live = self.scores(scene), scene.live
        layers, batch, heads, slots = scores.shape
        free = live & (scores < torch.inf)
        budgets = (self.budget - (live & ~free).sum(3)).clamp(min=0)

        def best_together(among: Live, counts: Int[Tensor, "layers batch"]) -> Live:
            # Slot by slot and head by head within a slot, so that of equals the newer stays, whichever head it is in.
            def together(tensor: Tensor) -> Tensor:
                return tensor.transpose(2, 3).reshape(layers, batch, 1, slots * heads)

            chosen = highest(together(scores), together(among), counts[:, :, None])
            return chosen.view(layers, batch, slots, heads).transpose(2, 3)

        among_best = best_together(free, budgets.sum(2)).sum(3)
        equal_shares = (budgets.double() * self.floor).long()
        shares = torch.round(among_best * (1 - self.floor) + equal_shares).long().clamp(min=int(self.protected == 0))
        kept = highest(scores, free, shares)
        lacking = (shares - free.sum(3)).clamp(min=0).sum(2)
        kept = kept | best_together(free & ~kept, lacking)
        # As there, a prompt that fits into the budget is not touched; here also one that just fills it.
        fits = budgets.sum(2) >= free.sum((2, 3))
        return (live & ~free) | torch.where(fits[:, :, None, None], free, kept)
