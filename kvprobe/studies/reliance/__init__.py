"""The price of having seen: is a summary that was read with its source in view a worse source once that is hidden?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES

Lead = Literal["ours", "model"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the reliance study.

    Attributes:
        contexts: hand-written conversations; those whose answer is not in both the turns and a summary are left out.
        turns: exchanges between the second summary and the question; the hidden turns are hidden before them.
            Answers at once (0) are compared with those later.
        leads: the words before the answer: ours ("The answer is"), or those that the model itself chooses with
            everything in view, where its reply holds the answer.
        bands: bands of layers in which what a retained summary holds is exchanged for what was computed again.
        answer: tokens of a greedy answer, in which the right words are looked for.
    """

    model: str = "smollm2-135m"
    contexts: int = ranged(48, 2, 48)
    turns: tuple[int, ...] = ranged((0, 1, 2, 4), 0, 4)
    leads: tuple[Lead, ...] = ("ours", "model")
    bands: int = ranged(4, 1, 64)
    answer: int = ranged(16, 1, 256)

    def validate(self) -> None:
        if 0 not in self.turns or len(self.turns) < 2 or "model" not in self.leads:
            raise UserError(
                f"Settings 'turns' and 'leads' are {self.turns} and {self.leads}; expected 0 and a larger number of "
                "turns, and the lead 'model', since these are what is compared."
            )


run = STUDIES["reliance"].run
