"""What does a single flipped bit of K or V do, by its place in the number?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.experiments.settings import ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import AnswerSettings, require_rates


@dataclass(frozen=True, kw_only=True)
class Config(AnswerSettings):
    """Settings of the bit-flip study.

    Attributes:
        dtypes: in which K and V are stored when a bit flips.
        flips: single flips at each bit of each dtype, for each item; layer, head, slot, channel, K or V are drawn.
        error_rates: shares of all numbers of K and V of which one drawn bit flips, in the first of the dtypes.
    """

    samples: int = ranged(24, 2, 100_000)
    dtypes: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")
    flips: int = ranged(4, 1, 1000)
    error_rates: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)

    def validate(self) -> None:
        require_rates("error_rates", self.error_rates, 1, "shares")


run = STUDIES["bitflips"].run
