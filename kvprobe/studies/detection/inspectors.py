"""Detectors that look at the cache itself."""

from typing import Any

import torch

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model


def inspected(model: Model, reference: KVCache, cache: KVCache) -> dict[str, Any]:
    """What each finds in a cache: `hash`, whether a number differs from the reference's."""
    return {"hash": float(not all(map(torch.equal, cache.tensors, reference.tensors)))}
