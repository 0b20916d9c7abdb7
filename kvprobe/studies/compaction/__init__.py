"""Mask or restart: what provenance, positions and delimiters each do to a compacted conversation."""

from kvprobe.studies import STUDIES
from kvprobe.studies.compaction.config import Config

__all__ = ["Config", "run"]

run = STUDIES["compaction"].run
