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
        tasks: instead of conversations, tasks of your own: .jsonl files of prompts and answers; also retrieve, needle,
            recite and gsm8k.
        policies: on these tasks, such as "SnapKV(50%)" (half of the prompt's slots) or "SinkWindow(4, 252) |
            Quantise(4)".
        items: of each task; 0 for all of a file, or 48.
        seed: of conversations, items, and random evictions.
    """

    samples: int = ranged(12, 2, 10_000)
    length: int = ranged(512, 160, 2000)
    budgets: tuple[int, ...] = ranged((5, 10, 20, 30, 50, 75, 100), 1, 100)
    tasks: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    items: int = ranged(0, 0, 100_000)

    def __post_init__(self) -> None:
        if isinstance(self.policies, list | tuple):
            object.__setattr__(self, "policies", tuple(map(str, self.policies)))  # policies of `kv.policies` as text
        super().__post_init__()

    def validate(self) -> None:
        if bool(self.tasks) != bool(self.policies):
            raise UserError(
                "Policies are tried on tasks: give both, such as --tasks FILE.jsonl --policies 'SnapKV(50%)'; or "
                "neither, for the catalogue of policies on conversations."
            )
        if self.policies:  # their module needs torch
            from kvprobe.policies.written import policies_of

            policies_of(self.policies)
        smallest = self.budgets[0]
        if smallest * self.length < 100 * FEWEST_SLOTS:
            raise UserError(
                f"Setting 'budgets' has {smallest}, which is {smallest * self.length / 100:g} slots of a conversation "
                f"of {self.length} tokens; expected at least {FEWEST_SLOTS} slots, "
                f"{-(-100 * FEWEST_SLOTS // self.length)} percent."
            )


run = STUDIES["policies"].run
