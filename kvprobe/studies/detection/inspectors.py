"""Detectors that look at the cache itself, and the canary, which asks for what is in it."""

from typing import Any, NamedTuple

import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.precision import fp8_parts
from kvprobe.detection.clean import Clean
from kvprobe.detection.diff import diff
from kvprobe.detection.rows import scores_of
from kvprobe.detection.scores import BLOCK
from kvprobe.inference.model import Model
from kvprobe.studies.detection.caches import AskedCache

LARGEST = 1e9
"""What stands for infinity."""


class Cleans(NamedTuple):
    """What clean caches of the model hold, and clean caches that are stored in fp8."""

    usual: Clean
    fp8: Clean

    def of(self, model: Model, cache: KVCache) -> Clean:
        """What this cache is held against."""
        return self.fp8 if fp8_parts(cache, model.geometry.parts) else self.usual


def inspected(model: Model, cleans: Cleans, reference: KVCache, asked: AskedCache) -> dict[str, Any]:
    """What each finds in a cache; see `collect`."""
    cache = asked.cache
    same = all(torch.equal(one.to(two.dtype), two) for one, two in zip(cache.tensors, reference.tensors, strict=True))
    return {"hash": float(not same)} | _by_diff(cache, reference) | _by_audit(model, cleans.of(model, cache), cache)


def _by_diff(cache: KVCache, reference: KVCache) -> dict[str, Any]:
    found = diff(cache, reference)
    first = found.first
    return {
        "diff": min(LARGEST, float(found.excess.max())),
        "diff_alarm": float(found.differs),
        "diff_kind": found.kind,
        "diff_layer": -1 if first is None else first.layer,
        "diff_block": -1 if first is None else first.block,
    }


def _by_audit(model: Model, clean: Clean, cache: KVCache) -> dict[str, Any]:
    """The largest excess, and the first layer and block with one beyond what is allowed; see `kv.audit`."""
    most = 0.0
    first: dict[int, tuple[float, int]] = {}
    for score in scores_of(model, cache, clean.parts)[0]:
        if not score.values.numel():
            continue
        excess = clean.excess(score)
        largest = min(LARGEST, float(excess.max()))
        if largest > first.get(score.layer, (1.0, -1))[0]:
            first[score.layer] = largest, int(score.slots[int(excess.amax(0).argmax())]) // BLOCK
        most = max(most, largest)
    layer = min(first, default=-1)
    return {
        "audit": most,
        "audit_layer": layer,
        "audit_block": first[layer][1] if first else -1,
    }
