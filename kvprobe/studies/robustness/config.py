"""Settings of the robustness study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.trial_settings import listed, percents, require_trial


@dataclass(frozen=True)
class Config:
    """Settings of the robustness study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        tasks: recite, retrieve, needle, gsm8k, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers; commas between.
        samples: items of each task.
        faults: by the names of the report's table; commas between.
        rates: share of the slots that is struck, in percent; commas between.
        repeats: draws of each fault at each rate.
        timing: fresh (drawn anew before each token, and undone after it), once (after the prompt, and left there), or
            piling (anew before each token, and left there).
        unit: what is drawn at once: slot (the same in all layers), layer (each its own slots), head, or number.
        procedure: rate in percent at which canarypwn's three faults are also run in every timing and unit; 0 leaves that out.
        follow: also measure KL to the clean run, which takes as long again.
        published: a table to print beside what was measured: seed001-7b or seed001-1.5b; none by default.
        seed: of items and random draws.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    tasks: str = "recite,retrieve,needle"
    samples: int = 20
    faults: str = (
        "gaussian,gaussian-channel,zeros,zero-values,distractor,permuted,permuted-keys,pointers-repeated,foreign-block,"
        "overlapping,shifted,fp8-scale"
    )
    rates: str = "2,5,10,20,30,50"
    repeats: int = 1
    timing: str = "fresh"
    unit: str = "slot"
    procedure: float = 10.0
    follow: bool = True
    published: str = ""
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_trial(self.samples, self.timing, self.unit, self.seed)
        require("repeats", self.repeats, 1, 1000)
        require("procedure", self.procedure, 0, 100)
        percents("rates", self.rates)
        listed("tasks", self.tasks, str)
        listed("faults", self.faults, str)
