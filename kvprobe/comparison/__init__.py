"""One question under several caches of one conversation: whole, masked, re-indexed and restarted."""

from kvprobe.comparison.compare import ARMS, Comparison, Reply, compare

__all__ = ["ARMS", "Comparison", "Reply", "compare"]
