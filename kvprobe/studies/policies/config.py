"""Settings of the policies study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError

FEWEST_SLOTS = 8
"""A budget leaves at least so many: four sinks and as many recent slots."""


@dataclass(frozen=True)
class Config:
    """Settings of the policies study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        samples: conversations, each with instructions, code, small talk and depth of its own.
        length: of a conversation in tokens, about.
        budgets: slots that a policy may keep, in percent of the conversation's, with commas between; at 100 nothing may
            change, which is a control.
        seed: of conversations, and random evictions.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    samples: int = 12
    length: int = 512
    budgets: str = "5,10,20,30,50,75,100"
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require("samples", self.samples, 2, 10_000)
        require("length", self.length, 160, 2000)
        require("seed", self.seed, 0)
        smallest = self.percents[0]
        if smallest * self.length < 100 * FEWEST_SLOTS:
            raise UserError(
                f"Setting 'budgets' has {smallest}, which is {smallest * self.length / 100:g} slots of a conversation of "
                f"{self.length} tokens; expected at least {FEWEST_SLOTS} slots, {-(-100 * FEWEST_SLOTS // self.length)} percent."
            )

    @property
    def percents(self) -> tuple[int, ...]:
        """The budgets as numbers, smallest first."""
        pieces = [piece.strip() for piece in self.budgets.split(",")]
        for piece in pieces:
            if not (piece.isascii() and piece.isdigit() and 1 <= int(piece) <= 100):
                raise UserError(
                    f"Setting 'budgets' is {self.budgets!r}, in which {piece!r} is no whole number from 1 to 100; expected "
                    f"percents with commas between, as in '10,20,50'."
                )
        found = sorted(map(int, pieces))
        if len(set(found)) != len(found):
            raise UserError(f"Setting 'budgets' is {self.budgets!r}, which names a budget twice; name each once.")
        return tuple(found)
