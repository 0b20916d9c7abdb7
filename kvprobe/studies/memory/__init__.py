"""Is the memory budget right, and what does the cache cost and save?"""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.units import bytes_in

SHORTEST, LONGEST = 4, 131_072


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the memory study.

    Attributes:
        contexts: tokens of the conversations whose peak is measured, the last two of them generated.
        prompt: tokens that are read before the cache is watched as it grows.
        new: tokens over which it is watched.
        batches: conversations of the shortest context that are read, continued and timed at once.
        timed: tokens at which a token is timed, with the cache and without it; a slope needs three lengths.
        repeats: of each timing.
        memory: what there is, for the figures: where it runs out is marked.
    """

    contexts: tuple[int, ...] = ranged((256, 512, 1024, 2048, 4096, 8192), SHORTEST, LONGEST)
    prompt: int = ranged(1024, 1, LONGEST)
    new: int = ranged(128, 2, 4096)
    batches: tuple[int, ...] = ranged((1, 2, 4, 8, 16), 1, 4096)
    timed: tuple[int, ...] = ranged((64, 128, 256, 512, 1024, 2048), SHORTEST, LONGEST)
    repeats: int = ranged(8, 2, 1000)
    memory: str = "1GiB"

    def validate(self) -> None:
        bytes_in(self.memory, "memory")
        for name, of, numbers in (("timed", "lengths", self.timed), ("batches", "sizes", self.batches)):
            if len(numbers) < 3:
                known = ", ".join(map(str, numbers))
                raise UserError(f"Setting {name!r} is {known}; expected at least 3 different {of}.")


run = STUDIES["memory"].run
