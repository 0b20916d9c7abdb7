"""Memory: is the budget right, and what does the cache cost and save?"""

from kvprobe.studies import STUDIES
from kvprobe.studies.memory.config import Config

__all__ = ["Config", "run"]

run = STUDIES["memory"].run
