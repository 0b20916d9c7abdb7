"""Settings of the patching study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.trial_settings import FACT_KINDS, FACTS_OF_A_KIND, chosen


@dataclass(frozen=True)
class Config:
    """Settings of the patching study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        kinds: of facts: code, name, number, instruction; commas between.
        facts: of each kind.
        ways: 2 patches each fact both ways, its second value into the run with the first and back; 1 takes one of the two, in turn.
        step: residual streams are patched at every so many layers; 0 leaves that out.
        check: cells of the attribution that are also patched exactly, for each run.
        seed: of that draw and of the halves.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    kinds: str = "code,name,number,instruction"
    facts: int = 4
    ways: int = 1
    step: int = 6
    check: int = 24
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        chosen("kinds", self.kinds, FACT_KINDS)
        require("facts", self.facts, 1, FACTS_OF_A_KIND)
        require("ways", self.ways, 1, 2)
        require("step", self.step, 0)
        require("check", self.check, 8)
        require("seed", self.seed, 0)
