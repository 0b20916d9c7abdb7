"""Settings of the compaction study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings

AVAILABLE_CONTEXTS = 48


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the compaction study.

    Attributes:
        contexts: different conversations; each is asked three questions and continued under every arm.
        samples: codes in all, for leak and use; each context gets samples / contexts of its own.
        folds: test folds of the probes.
        continuation: tokens of the full context's own reply over which the arms are compared.
        answer: tokens of an answer to a question.
        batch: codes that are read side by side.
        seed: of codes and folds.
    """

    contexts: int = AVAILABLE_CONTEXTS
    samples: int = 768
    folds: int = 5
    continuation: int = 32
    answer: int = 16
    batch: int = 16

    def validate(self) -> None:
        require("folds", self.folds, 3, 20)
        require("contexts", self.contexts, self.folds, AVAILABLE_CONTEXTS)
        require("continuation", self.continuation, 1, 512)
        require("answer", self.answer, 1, 256)
        require("batch", self.batch, 1)
        require("samples", self.samples, max(self.contexts * 2, 10 * self.folds), 40_000)
        if self.samples % self.contexts:
            below = self.samples - self.samples % self.contexts
            raise UserError(
                f"Setting 'samples' is {self.samples}, not a multiple of the {self.contexts} contexts; "
                f"expected {below} or {below + self.contexts}."
            )
