"""Settings of the memory study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.memory.units import bytes_in

SHORTEST, LONGEST = 4, 131_072


@dataclass(frozen=True)
class Config:
    """Settings of the memory study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        contexts: tokens of the conversations whose peak is measured, the last two of them generated, with commas between.
        prompt: tokens that are read before the cache is watched as it grows.
        new: tokens over which it is watched.
        timed: tokens at which a token is timed, with the cache and without it, with commas between.
        repeats: of each timing.
        memory: what there is, for the figures: where it runs out is marked.
        seed: of random draws; this study makes none.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    contexts: str = "256,512,1024,2048,4096,8192"
    prompt: int = 1024
    new: int = 128
    timed: str = "64,128,256,512,1024,2048"
    repeats: int = 8
    memory: str = "1GiB"
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require("prompt", self.prompt, 1, LONGEST)
        require("new", self.new, 2, 4096)
        require("repeats", self.repeats, 2, 1000)
        require("seed", self.seed, 0)
        bytes_in(self.memory, "memory")
        _ = self.lengths, self.timed_lengths

    @property
    def lengths(self) -> tuple[int, ...]:
        """The contexts as numbers, shortest first."""
        return _numbers("contexts", self.contexts, fewest=1)

    @property
    def timed_lengths(self) -> tuple[int, ...]:
        """The timed contexts as numbers, shortest first; a slope needs three."""
        return _numbers("timed", self.timed, fewest=3)


def _numbers(name: str, text: str, fewest: int) -> tuple[int, ...]:
    pieces = [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        if not (piece.isascii() and piece.isdigit() and SHORTEST <= int(piece) <= LONGEST):
            raise UserError(
                f"Setting {name!r} is {text!r}, in which {piece!r} is no whole number from {SHORTEST} to {LONGEST}; expected lengths with "
                f"commas between, as in '256,1024,4096'."
            )
    found = tuple(sorted(set(map(int, pieces))))
    if len(found) < fewest:
        raise UserError(f"Setting {name!r} is {text!r}; expected at least {fewest} different lengths.")
    return found
