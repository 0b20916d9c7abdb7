"""Idle rebuild: where a session drifts whose compacted cache expired and was computed again from the visible text."""

from dataclasses import dataclass

from kvprobe.checks import require
from kvprobe.experiments.settings import Settings
from kvprobe.studies import STUDIES

AVAILABLE_SESSIONS = 16


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the idle-rebuild study.

    Attributes:
        sessions: different scripted sessions; intervals are over them.
        continuation: tokens of a run's own reply that the other runs are held against.
    """

    sessions: int = AVAILABLE_SESSIONS
    continuation: int = 32

    def validate(self) -> None:
        require("sessions", self.sessions, 2, AVAILABLE_SESSIONS)
        require("continuation", self.continuation, 1, 512)


run = STUDIES["idle_rebuild"].run
