"""After a turn was masked, which of the slots that stay carry its effect?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AVAILABLE_CONTEXTS


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the carriers study.

    Attributes:
        contexts: different conversations; each is asked two questions, and is read with two codes.
        bands: bands that the layers are cut into.
        seed: of codes.
    """

    contexts: int = ranged(12, 2, AVAILABLE_CONTEXTS)
    bands: int = ranged(6, 1, 64)


run = STUDIES["carriers"].run
