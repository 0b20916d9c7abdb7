"""One question under several caches of one conversation: whole, masked, re-indexed and restarted."""

from kvprobe.comparison.compare import ARMS, Comparison, compare
from kvprobe.comparison.reply import FirstReply, Reply, replies_under

__all__ = ["ARMS", "Comparison", "FirstReply", "Reply", "compare", "replies_under"]
