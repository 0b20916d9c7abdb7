"""Policies: what each cache policy costs in quality for the memory that it saves."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings
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

    samples: int = 12
    length: int = 512
    budgets: tuple[int, ...] = (5, 10, 20, 30, 50, 75, 100)

    def validate(self) -> None:
        require("samples", self.samples, 2, 10_000)
        require("length", self.length, 160, 2000)
        smallest = self.budgets[0]
        require("budgets", smallest, 1, 100)
        require("budgets", self.budgets[-1], 1, 100)
        if smallest * self.length < 100 * FEWEST_SLOTS:
            raise UserError(
                f"Setting 'budgets' has {smallest}, which is {smallest * self.length / 100:g} slots of a conversation "
                f"of {self.length} tokens; expected at least {FEWEST_SLOTS} slots, "
                f"{-(-100 * FEWEST_SLOTS // self.length)} percent."
            )


run = STUDIES["policies"].run
