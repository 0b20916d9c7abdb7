"""Sparse features: record activations, train dictionaries on them with sae-lens, load any, and measure what they are worth."""

from kvprobe.features.activating import Activating, Example, activating
from kvprobe.features.corpus import self_written
from kvprobe.features.dictionary import SparseFeatures, shipped_dictionaries
from kvprobe.features.places import Place
from kvprobe.features.quality import Reconstruction, reconstruction, recovered, splice
from kvprobe.features.shards import Shards, record
from kvprobe.features.training import Recipe, train

__all__ = [
    "Activating",
    "Example",
    "Place",
    "Recipe",
    "Reconstruction",
    "Shards",
    "SparseFeatures",
    "activating",
    "reconstruction",
    "record",
    "recovered",
    "self_written",
    "shipped_dictionaries",
    "splice",
    "train",
]
