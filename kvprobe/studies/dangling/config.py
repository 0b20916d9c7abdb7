"""Settings of the dangling study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.trial_settings import FACT_KINDS, FACTS_OF_A_KIND, chosen, listed


@dataclass(frozen=True)
class Config:
    """Settings of the dangling study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        kinds: of conversations, by the fact that is asked for: code, name, number, instruction; commas between.
        prompts: conversations of each kind.
        rescued: for how many KV heads the hidden turn comes back into view; commas between.
        random: sets of random KV heads of each size to compare with.
        memos: lists that the model `ordinal`, trained to hold a payload or a pointer, is asked about; 0 leaves that out.
        seed: of halves, random heads, and memos.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    kinds: str = "code,name,number,instruction"
    prompts: int = 6
    rescued: str = "1,2,4,8,16,32,64"
    random: int = 5
    memos: int = 300
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        chosen("kinds", self.kinds, FACT_KINDS)
        require("prompts", self.prompts, 1, FACTS_OF_A_KIND)
        require("random", self.random, 2)
        require("memos", self.memos, 0)
        require("seed", self.seed, 0)
        sizes(self)


def sizes(config: Config) -> tuple[int, ...]:
    """For how many KV heads the hidden turn comes back, fewest first."""

    def read(piece: str) -> int:
        if not piece.isdigit() or int(piece) < 1:
            raise UserError(
                f"Setting 'rescued' is {config.rescued!r}, in which {piece!r} is no number of heads; expected 1 or more."
            )
        return int(piece)

    return tuple(sorted(listed("rescued", config.rescued, read)))
