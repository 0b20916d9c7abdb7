"""Does an early mistake change which experts compute what follows, act through that, and is a cold start other?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the routing study.

    Attributes:
        model: a mixture of experts.
        problems: sums worked step by step, each with a slip.
        start: tokens of a conversation whose routing is compared with that after other conversations.
        seed: of the problems.
    """

    model: str = "steps-moe-corrected-0"
    problems: int = ranged(48, 2, 10_000)
    start: int = ranged(32, 2, 512)


run = STUDIES["routing"].run
