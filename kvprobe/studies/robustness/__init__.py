"""Robustness: how much of the cache can be damaged, and how, before answers go wrong?"""

from kvprobe.studies import STUDIES
from kvprobe.studies.robustness.config import Config

__all__ = ["Config", "run"]

run = STUDIES["robustness"].run
