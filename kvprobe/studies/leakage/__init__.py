"""Leakage: how much of a hidden number survives in the KV cache after the turn that held it was masked."""

from kvprobe.studies import STUDIES
from kvprobe.studies.leakage.config import Config

__all__ = ["Config", "run"]

run = STUDIES["leakage"].run
