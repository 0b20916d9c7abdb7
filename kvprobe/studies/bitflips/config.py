"""Settings of the bit-flip study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass
from typing import Literal

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the bit-flip study.

    Attributes:
        tasks: recite, retrieve, needle, gsm8k, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers.
        samples: items of each task.
        dtypes: in which K and V are stored when a bit flips.
        flips: single flips at each bit of each dtype, for each item; layer, head, slot, channel, K or V are drawn.
        error_rates: shares of all numbers of K and V of which one drawn bit flips, in the first of the dtypes.
        follow: also measure KL to the clean run, which takes as long again.
        seed: of items and random draws.
    """

    tasks: tuple[str, ...] = ("retrieve",)
    samples: int = 24
    dtypes: tuple[Literal["bf16", "fp16", "fp32"], ...] = ("bf16", "fp16", "fp32")
    flips: int = 4
    error_rates: tuple[float, ...] = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    follow: bool = True

    def validate(self) -> None:
        require("samples", self.samples, 2, 100_000)
        require("flips", self.flips, 1, 1000)
        for share in self.error_rates:
            if not 0 < share <= 1:
                raise UserError(f"Setting 'error_rates' has {share:g}; expected shares above 0, up to 1.")
