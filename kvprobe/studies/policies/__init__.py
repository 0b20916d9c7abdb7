"""What does each cache policy cost in quality for the memory that it saves?"""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES

FEWEST_SLOTS = 8
"""A budget leaves at least so many: four sinks and as many recent slots."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the policies study.

    Attributes:
        samples: conversations, each with instructions, code, small talk and depth of its own.
        length: of a conversation in tokens, about.
        budgets: slots that a policy may keep, in percent of the conversation's; at 100 nothing may
            change, which is a control.
        seed: of conversations, and random evictions.
    """

    samples: int = ranged(12, 2, 10_000)
    length: int = ranged(512, 160, 2000)
    budgets: tuple[int, ...] = ranged((5, 10, 20, 30, 50, 75, 100), 1, 100)

    def validate(self) -> None:
        smallest = self.budgets[0]
        if smallest * self.length < 100 * FEWEST_SLOTS:
            raise UserError(
                f"Setting 'budgets' has {smallest}, which is {smallest * self.length / 100:g} slots of a conversation "
                f"of {self.length} tokens; expected at least {FEWEST_SLOTS} slots, "
                f"{-(-100 * FEWEST_SLOTS // self.length)} percent."
            )


run = STUDIES["policies"].run
