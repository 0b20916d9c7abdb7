"""Random eviction: the baseline of every other policy."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastZero
from kvprobe.policies.policy import Scene
from kvprobe.policies.ranking import rank
from kvprobe.policies.scored import Scored

_STREAM = 0x6B76
"""Separates these draws from everything else that is drawn from the same seed and sample."""


@dataclass(frozen=True)
class RandomEviction(Scored):
    """Keep `budget` slots drawn uniformly: the same in all layers and heads, or, with `per_head`, other slots in each.

    With `sinks`, the first live slots always stay, so that a policy that beats this one does more than keep those.

    Each slot has one random number, drawn from `seed`, its row's sample and its position, and the highest numbers stay.
    At every step this is a uniform draw from all slots so far, whichever rows are in the batch. Where positions are
    closed up between acts, new slots would take the positions of old ones, and their numbers. So with another mode than
    `gapped`, its own or that of a policy in the same chain, it acts once.
    """

    seed: AtLeastZero
    per_head: bool = False
    sinks: AtLeastZero = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_beyond_budget("sinks")

    def within(self, budget: int) -> dict[str, int]:
        return {"sinks": min(self.sinks, budget)}

    @property
    def draws_by_position(self) -> bool:
        return True

    @property
    def protected(self) -> int:
        return self.sinks

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        ledger = scene.cache.ledger
        layers, batch, heads, _ = scene.live.shape
        across = (layers, heads) if self.per_head else (1, 1)
        samples = scene.samples or tuple(range(batch))
        # Not for origins: those of spliced slots, and of re-indexed ones and what comes after them, may be the same.
        positions = ledger.positions.cpu().numpy()
        rows: list[Tensor] = []
        for sample, row in zip(samples, positions, strict=True):
            # Drawn in the order of positions, so that the numbers of old slots stay when new ones come.
            drawn = np.random.default_rng([self.seed, sample, _STREAM]).random((int(row.max(initial=0)) + 1, *across))
            rows.append(torch.as_tensor(drawn[row]))
        scores = torch.stack(rows).permute(2, 0, 3, 1).to(ledger.tokens.device)
        return scores.float().expand(layers, -1, heads, -1).masked_fill(rank(scene.live) < self.sinks, torch.inf)
