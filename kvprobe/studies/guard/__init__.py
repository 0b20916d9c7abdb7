"""What does evicting slots that no sound cache would hold cost on sound caches, and save on damaged ones?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import require_rates


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the guard study.

    Attributes:
        task: recite, retrieve, needle, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers.
        samples: items of the task.
        learnt: conversations of each kind that guards are learnt from: other items of the task, and small talk.
        alarms: share of the slots of sound caches that a guard may evict, in percent.
        faults: by the names of the robustness study's table; or bits, one flipped bit for each struck slot.
        rates: share of the slots that is struck once, after the prompt, in percent.
        seed: of items and random draws.
    """

    task: str = "retrieve"
    samples: int = ranged(60, 2, 100_000)
    learnt: int = ranged(32, 4, 36)
    alarms: float = 1.0
    faults: tuple[str, ...] = ("gaussian", "zeros", "fp8-scale", "bits", "foreign-block")
    rates: tuple[float, ...] = (2.0, 10.0)

    def validate(self) -> None:
        require_rates("rates", self.rates)
        require_rates("alarms", (self.alarms,), 50)


run = STUDIES["guard"].run
