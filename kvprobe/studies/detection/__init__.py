"""Who sees a wrong cache: a score, texts, perplexity, log-probabilities, a canary, an audit, a diff or a hash?"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.stats import conformal_rank
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import require_rates

ROUNDING = ("chunks", "batch", "eager", "bf16", "fp16", "vllm-39146")
"""Ways to the same cache that differ in rounding."""
COARSE = ("int8", "fp8")
"""The cache stored in 8 bits, where the reference is not."""
Size = Literal["spot", "block", "layer", "reported"]
"""One block of one layer; one block of all layers; all blocks of one layer; as large as was reported."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the detection study.

    Attributes:
        task: retrieve, recite, needle, gsm8k:FILE.jsonl, or a .jsonl file of prompts and answers.
        samples: prompts in whose caches bugs are planted.
        benign: more prompts, of which only sound caches are made.
        bugs: names from `kvprobe ls zoo`; all that are not benign by default.
        sizes: spot (one block of one layer), block (one block, all layers), layer (all blocks, one layer), reported.
        tokens: of the continuation that is compared.
        alarms: share of sound caches that a detector may report, in percent. Thresholds of prompts of even number
            come from sound caches of the odd ones, and the reverse.
        learnt: texts from which the audit learns what clean caches of the model hold.
        seed: of items and random draws.
    """

    task: str = "retrieve"
    samples: int = ranged(24, 2, 100_000)
    benign: int = ranged(80, 0, 100_000)
    bugs: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = ("spot", "block", "layer", "reported")
    tokens: int = ranged(24, 4, 512)
    alarms: float = 1.0
    learnt: int = ranged(120, 12, 10_000)

    def validate(self) -> None:
        require_rates("alarms", (self.alarms,), 50)
        sound = (self.samples + self.benign) // 2 * len(ROUNDING)
        if conformal_rank(sound, self.alarms / 100) > sound:
            raise UserError(
                f"Setting 'alarms': {self.alarms:g} % cannot be met from {sound} sound caches; take at least "
                f"{2 * ceil(100 / self.alarms / len(ROUNDING)) - self.samples} benign prompts, or allow "
                f"{ceil(100 / (sound + 1))} %."
            )


run = STUDIES["detection"].run
