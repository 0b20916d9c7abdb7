"""Budgets that are shared out between the heads of a layer by score (Ada-KV)."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.arguments import Share
from kvprobe.cache.slots import Evicts
from kvprobe.policies.policy import Live, Scene
from kvprobe.policies.ranking import highest
from kvprobe.policies.rebudgeted import Rebudgeted


@dataclass(frozen=True)
class HeadBudgets(Rebudgeted):
    """Another policy's scores, with each layer's budget shared out between its heads by score.

    Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
    (arXiv 2407.11550), by the arithmetic of its code (`AdaptiveSnapKVCluster` in FFY0/AdaKV): `HeadBudgets(SnapKV(64))`
    is Ada-SnapKV.

    The slots that the policy protects, such as its window, stay in every head. The other slots of the layer are ranked
    together. A head keeps its number among the best, times 1 − `floor`, plus `floor` of an equal share. Both terms are
    rounded, so a layer may hold up to one and a half slots per head less than the budget, or half a slot more.

    Three things differ. Scores are not normalised by head (an option there, off by default). A head for which no slot
    is left keeps one. Where an earlier act left a head fewer slots than its share, the best slots of the other heads
    take its place. In the paper, and in kvpress (`AdaKVPress`), `floor` instead guarantees each head its best slots and
    leaves the shares above it as they are; kvpress counts the window as part of them.
    """

    floor: Share = 0.2

    @property
    def slot_count(self) -> Evicts:
        return replace(self.policy.slot_count, even=False)

    def keep(self, scene: Scene) -> Live:
        scores, live = self.scores(scene), scene.live
        layers, batch, heads, slots = scores.shape
        free = live & (scores < torch.inf)
        budgets = (self.slots - (live & ~free).sum(3)).clamp(min=0)

        def best_together(among: Live, counts: Int[Tensor, "layers batch"]) -> Live:
            # Slot by slot, and head by head within a slot: of equal scores the newer slot stays, in any head.
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
        # As in the published code, a prompt that fits into the budget is not touched; here also one that just fills it.
        fits = budgets.sum(2) >= free.sum((2, 3))
        return (live & ~free) | torch.where(fits[:, :, None, None], free, kept)
