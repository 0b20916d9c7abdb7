"""How long and how fast a model is trained. Imports nothing heavy, so that the command line can show it at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvprobe.checks import require
from kvprobe.errors import UserError

Shape = Literal["moe", "active", "total"]
"""A mixture of experts; a dense model of as many active parameters; one of as many parameters in all."""
Corpus = Literal["plain", "corrected"]
"""Texts without errors; or with some, which are taken back."""
Content = Literal["sum", "copy"]
"""What a memento states, as in `kvprobe.tasks.mementos`: the sum of all digits up to there, or memento 0 again."""
Provenance = Literal["retained", "recomputed"]
"""Of mementos in view, as in `kvprobe.policies.policy`: they saw their block, or were read again without it."""

Memory = Literal["attention", "recurrent", "hybrid", "mamba"]
"""Attention in all layers; the gated delta rule in all; that, or Mamba-2, in all but the last, which attends."""


def check_view(keep: int, provenance: Provenance) -> None:
    """Refuse earlier blocks in view of a training that reads mementos again without any block."""
    if keep and provenance == "recomputed":
        raise UserError(
            f"Setting 'keep' is {keep}, but a block that stays in view cannot be trained with recomputed mementos; "
            "leave it 0, or choose retained ones."
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast.

    Attributes:
        steps: batches, each seen once.
        batch: examples in a batch.
        learning_rate: the highest; it rises over the first twentieth of the steps and falls to 0 along a cosine.
        checkpoint: steps between two checkpoints, at each of which the accuracy is measured.
        seed: of weights and examples.
    """

    steps: int
    batch: int
    learning_rate: float = 3e-3
    checkpoint: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "checkpoint"):
            require(name, getattr(self, name), 1)
        require("seed", self.seed, 0)
        require("learning_rate", self.learning_rate, 0)

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of the highest."""
        warm = max(1, self.steps // 20)
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / self.steps)))

    @property
    def keeps(self) -> bool:
        """Whether the weights of each checkpoint are kept, and those before the first step, which is one then."""
        return False

    def ends(self, accuracy: Mapping[str, float]) -> bool:
        """Whether a model of this accuracy needs no more steps."""
        return False


@dataclass(frozen=True, kw_only=True)
class UntilRight(Schedule):
    """It ends at the first checkpoint where enough is right, after `steps` at the latest, and keeps the weights.

    Attributes:
        kind: of right answers.
        enough: their share.
    """

    kind: str
    enough: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require("enough", self.enough, 0, 1)

    @property
    def keeps(self) -> bool:
        return True

    def ends(self, accuracy: Mapping[str, float]) -> bool:
        return accuracy[self.kind] >= self.enough


def until_95(steps: int = 3000, seed: int = 0) -> UntilRight:
    """How the models `memento` are trained."""
    return UntilRight(
        steps=steps, batch=16, learning_rate=1e-3, checkpoint=100, seed=seed, kind="mementos", enough=0.95
    )
