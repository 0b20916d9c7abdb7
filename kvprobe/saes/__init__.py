"""Sparse autoencoders: record activations, train dictionaries on them with sae-lens, load and evaluate others."""

from kvprobe.saes.activating import Activating, Example, activating
from kvprobe.saes.corpus import hand_written, self_written
from kvprobe.saes.dictionary import Dictionary, shipped_dictionaries
from kvprobe.saes.exchange import exchange_latents
from kvprobe.saes.places import Place
from kvprobe.saes.quality import Reconstruction, judge, reconstruction, recovered, splice
from kvprobe.saes.shards import Shards, record
from kvprobe.saes.training import Recipe, train, trained_in

__all__ = [
    "Activating",
    "Dictionary",
    "Example",
    "Place",
    "Recipe",
    "Reconstruction",
    "Shards",
    "activating",
    "exchange_latents",
    "hand_written",
    "judge",
    "reconstruction",
    "record",
    "recovered",
    "self_written",
    "shipped_dictionaries",
    "splice",
    "train",
    "trained_in",
]
