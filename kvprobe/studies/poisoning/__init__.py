"""How does an early mistake live on in what is written after it, where in the cache does it sit, and what cures it?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES

Mistake = Literal["random", "own"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the poisoning study.

    Attributes:
        model: dense or a mixture of experts: one of `steps`, or any chat model.
        problems: sums worked step by step, each with a slip.
        mistake: what the slip states: any other digit, or the wrong one that the model itself holds likeliest.
        new: most tokens of an answer.
        seed: of the problems.
    """

    model: str = "steps-moe-corrected-0"
    problems: int = ranged(96, 2, 10_000)
    mistake: Mistake = "random"
    new: int = ranged(120, 8, 2048)


run = STUDIES["poisoning"].run
