"""Bit flips: what a single flipped bit does, by its place in the number."""

from kvprobe.studies import STUDIES
from kvprobe.studies.bitflips.config import Config

__all__ = ["Config", "run"]

run = STUDIES["bitflips"].run
