"""Does a summary that was read with its source in view rely on it, or is it poisoned by it?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the reliance study.

    Attributes:
        contexts: hand-written conversations; those whose answer is not in both the turns and a summary are left out.
        bands: bands of layers in which what a retained summary holds is exchanged for what was computed again.
    """

    model: str = "smollm2-135m"
    contexts: int = ranged(48, 2, 48)
    bands: int = ranged(4, 1, 64)


run = STUDIES["reliance"].run
