"""Bands: which layers can bear noise, and how much of that is the noise's scale."""

from kvprobe.studies import STUDIES
from kvprobe.studies.bands.config import Config

__all__ = ["Config", "run"]

run = STUDIES["bands"].run
