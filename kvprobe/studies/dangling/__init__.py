"""Dangling: where attention goes when what it looked at is gone, and whether anything pointed there."""

from kvprobe.studies import STUDIES
from kvprobe.studies.dangling.config import Config

__all__ = ["Config", "run"]

run = STUDIES["dangling"].run
