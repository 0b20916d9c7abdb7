"""Carriers: after a turn was masked, which of the retained slots carry its effect?"""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies import STUDIES

AVAILABLE_CONTEXTS = 48


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the carriers study.

    Attributes:
        contexts: different conversations; each is asked two questions, and is read with two codes.
        bands: bands that the layers are cut into.
        seed: of codes.
    """

    contexts: int = 12
    bands: int = 6

    def validate(self) -> None:
        require("contexts", self.contexts, 2, AVAILABLE_CONTEXTS)
        require("bands", self.bands, 1, 64)


run = STUDIES["carriers"].run
