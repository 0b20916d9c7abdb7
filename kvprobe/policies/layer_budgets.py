"""Budgets that fall from the first layer to the last (PyramidKV)."""

from dataclasses import dataclass, replace

import torch

from kvprobe.arguments import AtLeastOne
from kvprobe.cache.slots import Evicts
from kvprobe.policies.policy import Live, Scene
from kvprobe.policies.ranking import highest
from kvprobe.policies.rebudgeted import Rebudgeted


@dataclass(frozen=True)
class LayerBudgets(Rebudgeted):
    """Another policy's scores, with budgets that fall in equal steps from the first layer to the last.

    Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (arXiv
    2406.02069), by the arithmetic of its code (`PyramidKVCluster` in Zefan-Cai/KVCache-Factory):
    `LayerBudgets(SnapKV(64))` is PyramidKV.

    The policy chooses its budget less the slots that it protects, such as its window. Of these the last layer keeps a
    share of 1/`beta`, rounded down. The first layer keeps so many that the two together keep twice the policy's number.
    `beta=1` is the same budget everywhere. Where a prompt is too short for the first layer's budget, the last layer's
    is larger. Where it is shorter than twice the slots to be chosen, all layers keep equally many.

    The step from layer to layer is rounded down, as in the published code. So a cache may hold up to (layers − 2)/2
    slots per layer more than the policy's own budget. Three things differ from that code. It asks for a window; here a
    layer for which no slot is left keeps one. It acts on the prompt only; a policy that goes on acting falls in steps
    for short prompts too, as Ada-KV's code for PyramidKV does. And the budgets of kvpress (`PyramidKVPress`) are
    another reading: not rounded down, and without the window on top.
    """

    beta: AtLeastOne = 20

    @property
    def slot_count(self) -> Evicts:
        return replace(self.policy.slot_count, beta=self.beta)

    def keep(self, scene: Scene) -> Live:
        # Row by row: what a row keeps must not depend on the rows beside it.
        lengths = scene.live.sum(3).amax((0, 2)).cpu()
        counts = torch.tensor([self.slot_count.layer_counts(len(scene.live), int(length)) for length in lengths]).T
        counts = counts.to(scene.live.device)
        return highest(self.scores(scene), scene.live, counts[:, :, None].expand(scene.live.shape[:3]))
