"""Attention: the patterns of chosen queries, and what can be measured on them."""

from kvprobe.attention.contributions import Contribution, contribution, written
from kvprobe.attention.head_roles import THRESHOLDS, roles
from kvprobe.attention.measures import dangling, lift
from kvprobe.attention.patterns import Patterns, attend

__all__ = ["THRESHOLDS", "Contribution", "Patterns", "attend", "contribution", "dangling", "lift", "roles", "written"]
