"""How does an early mistake live on in what is written after it, where in the cache does it sit, and what cures it?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.names import unknown
from kvprobe.studies import STUDIES

Mistake = Literal["random", "own"]
SUMS = "sums"
TASKS = (SUMS, "beads", "gsm8k")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the poisoning study.

    Attributes:
        model: dense or a mixture of experts: one of `steps`, or any chat model.
        task: sums of registers, which the models `steps` know; or word problems with worked solutions: beads, which
            are drawn, gsm8k, or gsm8k:FILE.jsonl (`question`, and `answer` with its marks).
        problems: worked step by step, each with a slip.
        mistake: what the slip states: any other digit, or a wrong one drawn by the model's own probabilities.
        new: most tokens of an answer.
        seed: of the problems.
    """

    model: str = "steps-moe-corrected-0"
    task: str = SUMS
    problems: int = ranged(96, 2, 10_000)
    mistake: Mistake = "random"
    new: int = ranged(120, 8, 2048)

    def validate(self) -> None:
        if self.task not in TASKS and not self.task.startswith("gsm8k:"):
            raise UserError(unknown("task, or gsm8k:FILE.jsonl", self.task, TASKS))


run = STUDIES["poisoning"].run
