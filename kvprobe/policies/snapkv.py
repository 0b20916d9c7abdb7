"""Observation window (SnapKV): the slots to which the prompt's last queries paid most attention stay."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastOne
from kvprobe.errors import UserError
from kvprobe.policies.policy import Scene
from kvprobe.policies.ranking import age
from kvprobe.policies.scored import Scored


@dataclass(frozen=True)
class SnapKV(Scored):
    """Keep `budget` slots per head: the last `window`, and of the others those to which the last `window` queries paid
    most attention.

    Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). The attention of
    these queries is summed, averaged over the query heads of a KV head, and smoothed by a maximum over `kernel`
    neighbouring slots of those that are live in the head, so that neighbours of a slot stay with it. It acts on the
    prompt only; generated tokens stay. Of a budget that is a share of the prompt, the window may take half.
    """

    window: AtLeastOne = 16
    kernel: AtLeastOne = 7
    every: AtLeastOne | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_beyond_budget("window")
        if self.kernel % 2 == 0:
            raise UserError(f"SnapKV has kernel={self.kernel}; it must be odd.")

    def within(self, budget: int) -> dict[str, int]:
        return {"window": min(self.window, max(1, budget // 2))}

    @property
    def observes(self) -> int:
        return self.window

    @property
    def protected(self) -> int:
        return self.window

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        assert scene.attention is not None
        paid = scene.attention.recent[:, :, :, -self.window :].sum(3)
        within = age(scene.live) < self.window
        # The window's own slots stay anyway, and dead slots are gone: neither may raise the score of its neighbours.
        paid = paid.masked_fill(within | ~scene.live, 0.0)
        # Nor may they, or padding that other rows have brought, part slots that are neighbours without them.
        together = (~scene.live).to(torch.uint8).argsort(dim=3, stable=True)
        held = paid.gather(3, together)
        smooth = torch.nn.functional.max_pool1d(held.flatten(0, 2), self.kernel, 1, self.kernel // 2).view_as(held)
        return torch.empty_like(paid).scatter_(3, together, smooth).masked_fill(within, torch.inf)
