"""What is lost when documents that were read by themselves are joined into one cache?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the compose study.

    Attributes:
        samples: pairs of documents, for each of which five things are asked; of the question to judge there are 48.
        facts: rooms, their colours, and people in each pair of documents.
        shares: percent of the second document's slots that are read again.
        seed: of what documents say, and of which slots are drawn.
    """

    samples: int = ranged(48, 2, 48)
    facts: int = ranged(2, 1, 8)
    shares: tuple[int, ...] = ranged((5, 15, 50), 1, 99)


run = STUDIES["compose"].run
