"""Sparse autoencoders: record activations, train dictionaries on them with sae-lens, load and evaluate others."""

from kvprobe.saes.activating import Activating, Example, activating
from kvprobe.saes.corpus import self_written
from kvprobe.saes.dictionary import Dictionary, shipped_dictionaries
from kvprobe.saes.places import Place
from kvprobe.saes.quality import Reconstruction, reconstruction, recovered, splice
from kvprobe.saes.shards import Shards, record
from kvprobe.saes.training import Recipe, train

__all__ = [
    "Activating",
    "Dictionary",
    "Example",
    "Place",
    "Recipe",
    "Reconstruction",
    "Shards",
    "activating",
    "reconstruction",
    "record",
    "recovered",
    "self_written",
    "shipped_dictionaries",
    "splice",
    "train",
]
