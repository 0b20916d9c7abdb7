"""Features: what sparse features see of a turn that was masked."""

from kvprobe.studies import STUDIES
from kvprobe.studies.features.config import Config

__all__ = ["Config", "run"]

run = STUDIES["features"].run
