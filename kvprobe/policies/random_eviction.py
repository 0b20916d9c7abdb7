"""Random eviction: the baseline that flatters nobody."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.policies.policy import Scene, Scored, rank

_STREAM = 0x6B76
"""Keeps the lots apart from whatever else is drawn from the same seed and sample."""


@dataclass(frozen=True)
class RandomEviction(Scored):
    """Keep `budget` slots drawn uniformly, the same in all layers and heads, or others in each (`per_head`).

    With `sinks`, the first live slots are spared, so that a policy which beats this one knows more than to keep those.
    Each slot draws its lot once, from `seed`, its row's sample and its origin, and the highest lots stay: at every step
    a uniform draw from all slots so far, whatever is beside the row in the batch. Where positions are closed up between
    acts, new slots would take the origins of old ones, and their lots; so with another mode than `gapped` it acts once.
    """

    seed: int
    per_head: bool = False
    sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("seed", 0)
        if self.mode != "gapped" and self.every is not None:
            raise UserError(
                f"RandomEviction with mode={self.mode!r} would draw the same lots again for new slots; give every=None, so that it "
                f"acts after the prompt only, or mode='gapped'."
            )
        self._whole("sinks", 0, self.budget)

    @property
    def protected(self) -> int:
        return self.sinks

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        ledger = scene.cache.ledger
        layers, batch, heads, _ = scene.live.shape
        across = (layers, heads) if self.per_head else (1, 1)
        samples = scene.samples or tuple(range(batch))
        if len(samples) != batch:
            raise UserError(f"There are {batch} rows but {len(samples)} sample numbers; give one for each row.")
        origins = ledger.origins.cpu().numpy()
        rows = []
        for sample, row in zip(samples, origins, strict=True):
            # Lots are drawn in the order of positions, so that those of old slots stay when new ones come.
            lots = np.random.default_rng([self.seed, sample, _STREAM]).random((int(row.max(initial=0)) + 1, *across))
            rows.append(torch.from_numpy(lots[row]))
        drawn = torch.stack(rows).permute(2, 0, 3, 1).to(ledger.tokens.device)
        return drawn.float().expand(layers, -1, heads, -1).masked_fill(rank(scene.live) < self.sinks, torch.inf)
