"""Dangling: where attention goes when what it looked at is gone, and whether anything pointed there."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
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
    prompts: int = 6
    rescued: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    random: int = 5
    memos: int = 300

    def validate(self) -> None:
        require("prompts", self.prompts, 1, FACTS_OF_A_KIND)
        require("rescued", self.rescued[0], 1)
        require("random", self.random, 2)
        require("memos", self.memos, 0)


run = STUDIES["dangling"].run
