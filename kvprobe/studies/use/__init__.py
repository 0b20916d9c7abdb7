"""Does the model use what a probe reads in its cache, and where?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AVAILABLE_CONTEXTS


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the use study.

    Attributes:
        contexts: different conversations; erasers are fitted on one half and tried on the other, and the reverse.
        codes: that each conversation is read with, its own.
        bands: bands that the layers are cut into.
        apart: edit K alone and V alone, too, not only both.
        randoms: random subspaces beside each eraser.
        strengths: of the edits whose dose and response are measured; 0 is no edit, 1 all that is
            erased or exchanged. What LEACE takes at each is held against the one before it.
        batch: conversations that are read side by side.
        seed: of codes and random subspaces.
    """

    contexts: int = ranged(16, 6, AVAILABLE_CONTEXTS)
    codes: int = ranged(24, 12, 10_000)
    bands: int = ranged(5, 1, 64)
    apart: bool = True
    randoms: int = ranged(2, 1, 20)
    strengths: tuple[float, ...] = ranged((0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0), 0, 10)
    batch: int = ranged(32, 1)


run = STUDIES["use"].run
