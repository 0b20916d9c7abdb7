"""Memory: is the budget right, and what does the cache cost and save?"""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings
from kvprobe.memory.units import bytes_in
from kvprobe.studies import STUDIES

SHORTEST, LONGEST = 4, 131_072


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the memory study.

    Attributes:
        contexts: tokens of the conversations whose peak is measured, the last two of them generated.
        prompt: tokens that are read before the cache is watched as it grows.
        new: tokens over which it is watched.
        timed: tokens at which a token is timed, with the cache and without it; a slope needs three lengths.
        repeats: of each timing.
        memory: what there is, for the figures: where it runs out is marked.
    """

    contexts: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    prompt: int = 1024
    new: int = 128
    timed: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    repeats: int = 8
    memory: str = "1GiB"

    def validate(self) -> None:
        require("prompt", self.prompt, 1, LONGEST)
        require("new", self.new, 2, 4096)
        require("repeats", self.repeats, 2, 1000)
        bytes_in(self.memory, "memory")
        for setting, lengths in (("contexts", self.contexts), ("timed", self.timed)):
            require(setting, lengths[0], SHORTEST, LONGEST)
            require(setting, lengths[-1], SHORTEST, LONGEST)
        if len(self.timed) < 3:
            raise UserError(
                f"Setting 'timed' is {', '.join(map(str, self.timed))}; expected at least 3 different lengths."
            )


run = STUDIES["memory"].run
