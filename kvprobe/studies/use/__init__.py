"""Use: whether the model uses what a probe reads, by erasing it from the cache and by exchanging it for another
run's."""

from kvprobe.studies import STUDIES
from kvprobe.studies.use.config import Config

__all__ = ["Config", "run"]

run = STUDIES["use"].run
