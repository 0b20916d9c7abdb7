"""Policies: what each cache policy costs in quality for the memory that it saves."""

from kvprobe.studies import STUDIES
from kvprobe.studies.policies.config import Config

__all__ = ["Config", "run"]

run = STUDIES["policies"].run
