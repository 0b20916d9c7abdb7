"""Attention: the patterns of chosen queries, and what can be measured on them."""

from kvprobe.attention.contributions import Contribution, contribution, written
from kvprobe.attention.damage import LOOKS, looks
from kvprobe.attention.head_roles import THRESHOLDS, roles
from kvprobe.attention.measures import dangling, lift, shared_out
from kvprobe.attention.patterns import Patterns, attend
from kvprobe.attention.views import in_view_of, logits_in_view, ranked_kv_heads

__all__ = [
    "LOOKS",
    "THRESHOLDS",
    "Contribution",
    "Patterns",
    "attend",
    "contribution",
    "dangling",
    "in_view_of",
    "lift",
    "logits_in_view",
    "looks",
    "ranked_kv_heads",
    "roles",
    "shared_out",
    "written",
]
