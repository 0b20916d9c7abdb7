"""How much of a hidden number survives in the KV cache after the turn that held it was masked?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AVAILABLE_CONTEXTS, require_samples

SecretKind = Literal["code", "name", "topic", "sentiment"]
"""See `kvprobe.tasks.secrets`."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the leakage study.

    Attributes:
        secret: what the hidden turn holds.
        contexts: different conversations; with 1, every sample shares one template.
        samples: conversations in all; each context gets samples / contexts secrets of its own.
        folds: test folds; probes are trained on the others.
        permutations: of labels within a conversation, for p-values; none can be below 1 / (permutations + 1).
        untrained: also read everything with a model of the same kind before it learned anything (twice the time).
        batch: conversations that are read side by side.
        seed: of secrets, folds and permutations.
    """

    secret: SecretKind = "code"
    contexts: int = ranged(AVAILABLE_CONTEXTS, 1, AVAILABLE_CONTEXTS)
    samples: int = 768
    folds: int = ranged(5, 3, 20)
    permutations: int = ranged(49, 1, 10_000)
    untrained: bool = False
    batch: int = ranged(32, 1)

    def validate(self) -> None:
        if 1 < self.contexts < self.folds:
            raise UserError(
                f"Setting 'contexts' is {self.contexts}; expected 1, or at least as many as folds ({self.folds})."
            )
        require_samples(self.samples, self.contexts, "contexts", self.folds)


run = STUDIES["leakage"].run
