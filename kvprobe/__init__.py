"""kvprobe: a microscope for the KV cache of a language model.

    import kvprobe as kv
    model = kv.load("smollm2-135m")

Names are imported when first used, so that `import kvprobe` and `kvprobe --help` cost nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvprobe import attention, erasing, faults, features, layers, patching, plots, policies, views
    from kvprobe.attention import Patterns, attend
    from kvprobe.cache import KVCache
    from kvprobe.capture import Captured
    from kvprobe.designs import Design, Sample, Target
    from kvprobe.doctor import examine
    from kvprobe.generate import Generation, row_generators
    from kvprobe.layers import LayerMap, layer_map
    from kvprobe.ledger import Ledger
    from kvprobe.live import Kept
    from kvprobe.measured import Measured, measure
    from kvprobe.memory.budget import Budget, budget
    from kvprobe.model import Model, load
    from kvprobe.patching import (
        KL,
        Attribution,
        LogitDiff,
        LogProb,
        Pair,
        PairMaps,
        PatchMap,
        attribute,
        patch_pairs,
        patch_sweep,
    )
    from kvprobe.policies.policy import Scene
    from kvprobe.probing.claims import Probing
    from kvprobe.probing.live_scan import live_scan
    from kvprobe.probing.probe import probe
    from kvprobe.probing.published_probe import Probe
    from kvprobe.runs import Run
    from kvprobe.sweep import Sweep, Trial
    from kvprobe.transcript import Message, Part, Tokens, Transcript

_HOMES = {
    "Attribution": "kvprobe.patching",
    "Budget": "kvprobe.memory.budget",
    "Captured": "kvprobe.capture",
    "Design": "kvprobe.designs",
    "Generation": "kvprobe.generate",
    "KL": "kvprobe.patching",
    "KVCache": "kvprobe.cache",
    "Kept": "kvprobe.live",
    "LayerMap": "kvprobe.layers",
    "Ledger": "kvprobe.ledger",
    "LogProb": "kvprobe.patching",
    "LogitDiff": "kvprobe.patching",
    "Measured": "kvprobe.measured",
    "Message": "kvprobe.transcript",
    "Model": "kvprobe.model",
    "Pair": "kvprobe.patching",
    "PairMaps": "kvprobe.patching",
    "Part": "kvprobe.transcript",
    "PatchMap": "kvprobe.patching",
    "Patterns": "kvprobe.attention",
    "Probe": "kvprobe.probing.published_probe",
    "Probing": "kvprobe.probing.claims",
    "Run": "kvprobe.runs",
    "Sample": "kvprobe.designs",
    "Scene": "kvprobe.policies.policy",
    "Sweep": "kvprobe.sweep",
    "Target": "kvprobe.designs",
    "Tokens": "kvprobe.transcript",
    "Transcript": "kvprobe.transcript",
    "Trial": "kvprobe.sweep",
    "attend": "kvprobe.attention",
    "attention": "kvprobe.attention",
    "attribute": "kvprobe.patching",
    "budget": "kvprobe.memory.budget",
    "erasing": "kvprobe.erasing",
    "examine": "kvprobe.doctor",
    "faults": "kvprobe.faults",
    "features": "kvprobe.features",
    "layer_map": "kvprobe.layers",
    "layers": "kvprobe.layers",
    "live_scan": "kvprobe.probing.live_scan",
    "load": "kvprobe.model",
    "measure": "kvprobe.measured",
    "patch_pairs": "kvprobe.patching",
    "patch_sweep": "kvprobe.patching",
    "patching": "kvprobe.patching",
    "plots": "kvprobe.plots",
    "policies": "kvprobe.policies",
    "probe": "kvprobe.probing.probe",
    "row_generators": "kvprobe.generate",
    "views": "kvprobe.views",
}

__all__ = [
    "KL",
    "Attribution",
    "Budget",
    "Captured",
    "Design",
    "Generation",
    "KVCache",
    "Kept",
    "LayerMap",
    "Ledger",
    "LogProb",
    "LogitDiff",
    "Measured",
    "Message",
    "Model",
    "Pair",
    "PairMaps",
    "Part",
    "PatchMap",
    "Patterns",
    "Probe",
    "Probing",
    "Run",
    "Sample",
    "Scene",
    "Sweep",
    "Target",
    "Tokens",
    "Transcript",
    "Trial",
    "attend",
    "attention",
    "attribute",
    "budget",
    "erasing",
    "examine",
    "faults",
    "features",
    "layer_map",
    "layers",
    "live_scan",
    "load",
    "measure",
    "patch_pairs",
    "patch_sweep",
    "patching",
    "plots",
    "policies",
    "probe",
    "row_generators",
    "views",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from kvprobe.suggest import unknown

        raise AttributeError(unknown("name in kvprobe", name, __all__))
    home = import_module(_HOMES[name])
    return home if home.__name__ == f"kvprobe.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
