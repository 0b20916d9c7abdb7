"""Mask or restart: what provenance, positions and delimiters each do to a compacted conversation."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import require_samples

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
        require_samples(self.samples, self.contexts, "contexts", self.folds)


run = STUDIES["compaction"].run
