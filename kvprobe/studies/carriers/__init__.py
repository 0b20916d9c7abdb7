"""Carriers: after a turn was masked, which of the retained slots carry its effect?"""

from kvprobe.studies import STUDIES
from kvprobe.studies.carriers.config import Config

__all__ = ["Config", "run"]

run = STUDIES["carriers"].run
