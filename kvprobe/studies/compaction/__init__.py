"""Mask or restart? How much of the difference is provenance, how much position, how much delimiters?"""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AVAILABLE_CONTEXTS, require_samples


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the compaction study.

    Attributes:
        contexts: different conversations; each is asked three questions and continued under every arm.
        samples: codes in all, for leak and use; each context gets samples / contexts of its own.
        folds: test folds of the probes.
        turns: exchanges between the second summary and the three questions, of which T3 is the first. All else is
            measured at T3 or right after it.
        continuation: tokens of the full context's own reply over which the arms are compared.
        answer: tokens of an answer to a question.
        batch: codes that are read side by side.
        seed: of codes and folds.
    """

    contexts: int = AVAILABLE_CONTEXTS
    samples: int = 768
    folds: int = ranged(5, 3, 20)
    turns: int = ranged(1, 0, 4)
    continuation: int = ranged(32, 1, 512)
    answer: int = ranged(16, 1, 256)
    batch: int = ranged(16, 1)

    def validate(self) -> None:
        require("contexts", self.contexts, self.folds, AVAILABLE_CONTEXTS)
        require_samples(self.samples, self.contexts, "contexts", self.folds)


run = STUDIES["compaction"].run
