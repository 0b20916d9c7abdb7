"""Does a summary that was read with its source in view rely on it, or is it poisoned by it?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the reliance study.

    Attributes:
        contexts: hand-written conversations; those whose answer is not in both the turns and a summary are left out.
        turns: exchanges between the second summary and the question; the hidden turns are hidden before them.
        lead: the words before the answer: `ours` ("The answer is"), or those that the model itself chooses with
            everything in view, where its reply holds the answer.
        bands: bands of layers in which what a retained summary holds is exchanged for what was computed again.
    """

    model: str = "smollm2-135m"
    contexts: int = ranged(48, 2, 48)
    turns: int = ranged(0, 0, 4)
    lead: Literal["ours", "model"] = "ours"
    bands: int = ranged(4, 1, 64)


run = STUDIES["reliance"].run
