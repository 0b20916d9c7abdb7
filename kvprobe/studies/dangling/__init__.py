"""A turn is hidden: where does the attention go that looked at it, and does anything point there?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import FACT_KINDS, FACTS_OF_A_KIND, FactKind


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the dangling study.

    Attributes:
        kinds: of conversations, by the fact that is asked for.
        prompts: conversations of each kind.
        rescued: for how many KV heads the hidden turn comes back into view.
        random: sets of random KV heads of each size to compare with.
        memos: lists that the model `ordinal`, trained to hold a payload or a pointer, is asked about; 0 leaves them
            out.
        seed: of halves, random heads, and memos.
    """

    kinds: tuple[FactKind, ...] = FACT_KINDS
    prompts: int = ranged(6, 1, FACTS_OF_A_KIND)
    rescued: tuple[int, ...] = ranged((1, 2, 4, 8, 16, 32, 64), 1)
    random: int = ranged(5, 2)
    memos: int = ranged(300, 0)


run = STUDIES["dangling"].run
