"""Settings of the filter-poison study. Imports nothing heavy, so that the command line can show them at once."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.experiments.trial_settings import FACT_KINDS, FACTS_OF_A_KIND, chosen, listed

FALSE = "false"
"""The family in which nothing of the cache is broken, but what was said in it is not so."""


@dataclass(frozen=True)
class Config:
    """Settings of the filter-poison study.

    Attributes:
        model: a name from `kvprobe ls`, a hub id, a local folder or a .gguf file.
        kinds: of conversations, by the fact that is asked for: code, name, number, instruction; commas between.
        prompts: conversations of each kind.
        families: faults by the names of the robustness study, each with the percentage of slots that it strikes after a colon;
            and false, another fact in the place of the true one; commas between.
        suffix: last tokens before the answer that are read after the damage, and over which KL is averaged.
        top: heads of each sort, found on one half of the conversations, that are restored together on the other.
        random: sets of heads of the same layers to compare them with.
        seed: of random draws, halves, and random heads.
        device: auto, cpu, cuda, cuda:1 …
        dtype: auto (float32 on the CPU, bfloat16 elsewhere), float32, bfloat16 or float16.
    """

    model: str = "smollm2-135m"
    kinds: str = "code,name,number,instruction"
    prompts: int = 4
    families: str = "gaussian:1,zeros:30,distractor:50,permuted-keys:50,shifted:100,false"
    suffix: int = 6
    top: int = 10
    random: int = 20
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        chosen("kinds", self.kinds, FACT_KINDS)
        require("prompts", self.prompts, 1, FACTS_OF_A_KIND)
        require("suffix", self.suffix, 1, 16)
        require("top", self.top, 1)
        require("random", self.random, 2)
        require("seed", self.seed, 0)
        if len(families(self)) < 2:
            raise UserError(f"Setting 'families' is {self.families!r}; a verdict needs two or more.")


def families(config: Config) -> dict[str, float]:
    """The percentage of slots that each family strikes, by its name; 100 where the fact is another."""

    def read(piece: str) -> tuple[str, float]:
        name, _, rate = piece.partition(":")
        try:
            share = float(rate) if name != FALSE or rate else 100.0
        except ValueError:
            share = -1.0
        if not 0 < share <= 100 or (name == FALSE and rate):
            raise UserError(
                f"Setting 'families' has {piece!r}; expected a fault and a percentage above 0, to 100, as in zeros:30, or false."
            )
        return name, share

    found = listed("families", config.families, read)
    if len(dict(found)) < len(found):
        raise UserError(f"Setting 'families' is {config.families!r}, which names a fault twice; name each once.")
    return dict(found)
