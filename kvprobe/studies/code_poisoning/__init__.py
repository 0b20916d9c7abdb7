"""What is left of a wrong answer in code: is it fixed, by what, does the model see it, and what does each way cost?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the study of wrong answers in code.

    Attributes:
        model: any chat model that writes Python.
        tasks: little functions to be written, of 32 templates with three sets of numbers each.
        draws: first answers that are drawn for each task, until one is wrong and one is right.
        rounds: times that a route may mend what fails its tests.
        new: most tokens of an answer.
        rows: tasks whose answers are worked on together, and most answers that are generated at once. Rounding, and so
            a near tie, may depend on it.
        seed: of the answers drawn, and of the bugs.
    """

    model: str = "qwen2.5-coder-0.5b"
    tasks: int = ranged(96, 8, 96)
    draws: int = ranged(6, 1, 64)
    rounds: int = ranged(2, 1, 8)
    new: int = ranged(200, 8, 2048)
    rows: int = ranged(32, 1, 512)


run = STUDIES["code_poisoning"].run
