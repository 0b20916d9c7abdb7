"""A session of which something left the view goes idle, and its cache is rebuilt from the visible text. Where does it
drift?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES

AVAILABLE_SESSIONS = 16
MEASURED = (2, 3, 4, 5, 6, 7, 8)
"""The turns of a session at which runs are held against each other."""
CONTROL, FIRST = 3, 4
"""The last turn before the removal, and the first after it."""
Removed = Literal["compaction", "tool_result", "window"]


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the idle-rebuild study.

    Attributes:
        removed: what leaves the view before turn 4: turns 1 to 3, replaced by a summary (`compaction`); the result of a
            tool that the summary is of (`tool_result`); or turn 1, and before each later turn the next (`window`).
        sessions: different scripted sessions; intervals are over them.
        rebuilds: turns before which a run is rebuilt; 3, 4 and a later one among them. Where all leaves at once, all
            runs that are rebuilt afterwards are equal (a control), and more of them say no more about the drift.
        continuation: tokens of a run's own reply that the other runs are held against.
    """

    removed: Removed = "compaction"
    sessions: int = ranged(AVAILABLE_SESSIONS, 2, AVAILABLE_SESSIONS)
    rebuilds: tuple[int, ...] = ranged(MEASURED, MEASURED[0], MEASURED[-1])
    continuation: int = ranged(32, 1, 512)

    def validate(self) -> None:
        if not {CONTROL, FIRST} <= set(self.rebuilds) or self.rebuilds[-1] == FIRST:
            raise UserError(
                f"Setting 'rebuilds' is {', '.join(map(str, self.rebuilds))}; expected {CONTROL}, {FIRST} "
                "and a later turn among them: the last before the removal, which is a control, and two after it."
            )


run = STUDIES["idle_rebuild"].run
