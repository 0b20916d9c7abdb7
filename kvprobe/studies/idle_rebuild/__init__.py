"""A compacted session goes idle and its cache is rebuilt from the visible text. Where does it drift?"""

from dataclasses import dataclass

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES

AVAILABLE_SESSIONS = 16


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the idle-rebuild study.

    Attributes:
        sessions: different scripted sessions; intervals are over them.
        continuation: tokens of a run's own reply that the other runs are held against.
    """

    sessions: int = ranged(AVAILABLE_SESSIONS, 2, AVAILABLE_SESSIONS)
    continuation: int = ranged(32, 1, 512)


run = STUDIES["idle_rebuild"].run
