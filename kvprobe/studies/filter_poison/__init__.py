"""Filter or poison: which components pass damage on to the answer, and which keep it away?"""

from kvprobe.studies import STUDIES
from kvprobe.studies.filter_poison.config import Config

__all__ = ["Config", "run"]

run = STUDIES["filter_poison"].run
