"""Erasing: take a concept out of K and V, or exchange it for another run's, to see whether the model uses it."""

from kvprobe.erasing.caches import erase, interchange, mix
from kvprobe.erasing.inlp import inlp
from kvprobe.erasing.leace import leace, leace_of
from kvprobe.erasing.random_eraser import random_eraser
from kvprobe.erasing.subspace import Eraser, Subspace

__all__ = ["Eraser", "Subspace", "erase", "inlp", "interchange", "leace", "leace_of", "mix", "random_eraser"]
