"""Does a slot hold the address of what was said before, which breaks when that is hidden, or what it means?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the pointers study.

    Attributes:
        conversations: of each form of pointer.
        shots: answered examples before each conversation.
        bands: bands that the layers are cut into.
        memos: lists of each kind that the model `ordinal`, whose pointers and payloads are known, is asked about.
        seed: of people, things and memos.
    """

    conversations: int = ranged(48, 8, 1000)
    shots: int = ranged(3, 0, 5)
    bands: int = ranged(4, 1, 64)
    memos: int = ranged(48, 8, 1000)


run = STUDIES["pointers"].run
