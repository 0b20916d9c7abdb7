"""Heavy hitters (H2O): the slots that have received most attention so far stay, and the newest."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastZero
from kvprobe.policies.policy import Scene
from kvprobe.policies.ranking import age
from kvprobe.policies.scored import Scored


@dataclass(frozen=True)
class H2O(Scored):
    """Keep `budget` slots per head: the newest `recent`, and of the others those with most attention in total.

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv
    2306.14048). Attention is summed over all queries so far, including those of the prompt, and averaged over the query
    heads that share a KV head. Half the budget is recent by default, as in the paper.
    """

    recent: AtLeastZero | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent is not None:
            self._refuse_beyond_budget("recent")

    def within(self, budget: int) -> dict[str, int]:
        return {} if self.recent is None else {"recent": min(self.recent, budget)}

    @property
    def observes(self) -> int:
        return 0

    @property
    def protected(self) -> int:
        return self.slots // 2 if self.recent is None else self.recent

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        assert scene.attention is not None
        return scene.attention.total.masked_fill(age(scene.live) < self.protected, torch.inf)
