"""Settings of the bit-flip study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.trial_settings import chosen, listed, require_trial

DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Config:
    """Settings of the bit-flip study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        tasks: recite, retrieve, needle, gsm8k, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers; commas between.
        samples: items of each task.
        dtypes: in which K and V are stored when a bit flips: bf16, fp16, fp32; commas between.
        flips: single flips at each bit of each dtype, for each item; layer, head, slot, channel, K or V are drawn.
        error_rates: shares of all numbers of K and V of which one drawn bit flips, in the first of the dtypes; commas between.
        follow: also measure KL to the clean run, which takes as long again.
        seed: of items and random draws.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    tasks: str = "retrieve"
    samples: int = 24
    dtypes: str = "bf16,fp16,fp32"
    flips: int = 4
    error_rates: str = "1e-7,1e-6,1e-5,1e-4,1e-3"
    follow: bool = True
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_trial(self.samples, "once", "number", self.seed)
        require("flips", self.flips, 1, 1000)
        listed("tasks", self.tasks, str)
        chosen("dtypes", self.dtypes, DTYPES)
        _ = self.shares

    @property
    def shares(self) -> tuple[float, ...]:
        """The error rates as numbers, smallest first."""

        def read(piece: str) -> float:
            try:
                value = float(piece)
            except ValueError:
                value = -1.0
            if not 0 < value <= 1:
                raise UserError(f"Setting 'error_rates' holds {piece!r}; expected shares above 0, up to 1.")
            return value

        return tuple(sorted(listed("error_rates", self.error_rates, read)))
