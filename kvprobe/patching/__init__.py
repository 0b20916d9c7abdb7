"""Patching: swap K and V between two runs, slot by slot, to find which slots the answer was read from."""

from kvprobe.patching.attribution import Attribution, attribute
from kvprobe.patching.donor import aligned
from kvprobe.patching.grid import Cell
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, LogitDiff, LogProb, Metric
from kvprobe.patching.pairs import Pair, PairMaps, patch_pairs
from kvprobe.patching.patch_sweep import patch_sweep
from kvprobe.patching.payloads import payload_or_pointer
from kvprobe.patching.swaps import suffix_logits, swap_cells

__all__ = [
    "KL",
    "Attribution",
    "Cell",
    "LogProb",
    "LogitDiff",
    "Metric",
    "Pair",
    "PairMaps",
    "PatchMap",
    "aligned",
    "attribute",
    "patch_pairs",
    "patch_sweep",
    "payload_or_pointer",
    "suffix_logits",
    "swap_cells",
]
