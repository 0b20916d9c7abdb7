"""Idle rebuild: where a session drifts whose compacted cache expired and was computed again from the visible text."""

from kvprobe.studies import STUDIES
from kvprobe.studies.idle_rebuild.config import Config

__all__ = ["Config", "run"]

run = STUDIES["idle_rebuild"].run
