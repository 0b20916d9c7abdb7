"""Use: whether the model uses what a probe reads, by erasing it from the cache and by exchanging it for another
run's."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies import STUDIES

AVAILABLE_CONTEXTS = 48


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the use study.

    Attributes:
        contexts: different conversations; erasers are fitted on one half and tried on the other, and the reverse.
        codes: that each conversation is read with, its own.
        bands: bands that the layers are cut into.
        randoms: random subspaces beside each eraser.
        batch: conversations that are read side by side.
        seed: of codes and random subspaces.
    """

    contexts: int = 16
    codes: int = 24
    bands: int = 5
    randoms: int = 2
    batch: int = 32

    def validate(self) -> None:
        require("contexts", self.contexts, 6, AVAILABLE_CONTEXTS)
        require("codes", self.codes, 12, 10_000)
        require("bands", self.bands, 1, 64)
        require("randoms", self.randoms, 1, 20)
        require("batch", self.batch, 1)


run = STUDIES["use"].run
