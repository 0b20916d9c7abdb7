"""Settings of the robustness study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies.settings import Timing, UnitName, require_percents


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the robustness study.

    Attributes:
        tasks: recite, retrieve, needle, gsm8k, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers.
        samples: items of each task.
        faults: by the names of the report's table.
        rates: share of the slots that is struck, in percent.
        repeats: draws of each fault at each rate.
        timing: fresh (drawn anew before each token, and undone after it), once (after the prompt, and left there), or
            piling (anew before each token, and left there).
        unit: what is drawn at once: slot (the same in all layers), layer (each its own slots), head, or number.
        procedure: rate in percent at which canarypwn's faults are also run in every timing and unit; 0 leaves that out.
        follow: also measure KL to the clean run, which takes as long again.
        reported: a table to print beside what was measured, such as canarypwn-7b; none by default.
        seed: of items and random draws.
    """

    tasks: tuple[str, ...] = ("recite", "retrieve", "needle")
    samples: int = 20
    faults: tuple[str, ...] = (
        "gaussian",
        "gaussian-channel",
        "zeros",
        "zero-values",
        "distractor",
        "permuted",
        "permuted-keys",
        "pointers-repeated",
        "foreign-block",
        "overlapping",
        "shifted",
        "fp8-scale",
    )
    rates: tuple[float, ...] = (2.0, 5.0, 10.0, 20.0, 30.0, 50.0)
    repeats: int = 1
    timing: Timing = "fresh"
    unit: UnitName = "slot"
    procedure: float = 10.0
    follow: bool = True
    reported: str = ""

    def validate(self) -> None:
        require("samples", self.samples, 2, 100_000)
        require("repeats", self.repeats, 1, 1000)
        require("procedure", self.procedure, 0, 100)
        require_percents("rates", self.rates)
