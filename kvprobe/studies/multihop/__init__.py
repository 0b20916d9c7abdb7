"""Multihop: how far a hidden turn reaches when every turn is summarised and masked in its turn."""

from kvprobe.studies import STUDIES
from kvprobe.studies.multihop.config import Config

__all__ = ["Config", "run"]

run = STUDIES["multihop"].run
