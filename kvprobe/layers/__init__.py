"""Layers: which of them filter damage to the cache, and which pass it on."""

from kvprobe.layers.correlation import index_correlation
from kvprobe.layers.head_sets import against_random, head_sets, random_heads, ranked_heads, restored_sets
from kvprobe.layers.layer_map import LayerMap, layer_map, restored_together, states
from kvprobe.layers.suffix import Component, Outputs, Replacement, Suffix
from kvprobe.layers.verdicts import by_chance, verdicts

__all__ = [
    "Component",
    "LayerMap",
    "Outputs",
    "Replacement",
    "Suffix",
    "against_random",
    "by_chance",
    "head_sets",
    "index_correlation",
    "layer_map",
    "random_heads",
    "ranked_heads",
    "restored_sets",
    "restored_together",
    "states",
    "verdicts",
]
