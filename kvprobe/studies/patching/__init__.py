"""Patching: from which layers, slots and heads is a fact read, and from K or from V?"""

from kvprobe.studies import STUDIES
from kvprobe.studies.patching.config import Config

__all__ = ["Config", "run"]

run = STUDIES["patching"].run
