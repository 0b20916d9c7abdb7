"""kvprobe: a microscope for the KV cache of a language model.

    import kvprobe as kv
    model = kv.load("smollm2-135m")

Names are imported when first used, so that `import kvprobe` and `kvprobe --help` cost nothing.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from kvprobe import attention, erasing, faults, layers, patching, policies, routing, saes
    from kvprobe.attention import Patterns, attend
    from kvprobe.cache.cache import KVCache
    from kvprobe.cache.ledger import Ledger
    from kvprobe.comparison import Comparison, compare
    from kvprobe.errors import UserError
    from kvprobe.experiments.runs import Run
    from kvprobe.inference.capture import Captured
    from kvprobe.inference.doctor import examine
    from kvprobe.inference.generate import Generation, row_generators
    from kvprobe.inference.measured import Measured, measure
    from kvprobe.inference.model import Model, load
    from kvprobe.inference.sweep import Sweep, Trial
    from kvprobe.inference.under_policy import Snapshot
    from kvprobe.layers import LayerMap, layer_map
    from kvprobe.memory.budget import Budget, budget
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
    from kvprobe.probes.probe import Probe
    from kvprobe.probes.scan import scan
    from kvprobe.probing.claims import Probing
    from kvprobe.probing.probe import probe
    from kvprobe.report import plots, views
    from kvprobe.tasks.designs import Design, Sample, Target
    from kvprobe.text.chat_file import read_chat
    from kvprobe.text.messages import Message, Part
    from kvprobe.text.prefix import CommonPrefix, common_prefix
    from kvprobe.text.tokens import Tokens
    from kvprobe.text.transcript import Transcript

_HOMES = {
    "Attribution": "kvprobe.patching",
    "Budget": "kvprobe.memory.budget",
    "Captured": "kvprobe.inference.capture",
    "CommonPrefix": "kvprobe.text.prefix",
    "Comparison": "kvprobe.comparison",
    "Design": "kvprobe.tasks.designs",
    "Generation": "kvprobe.inference.generate",
    "KL": "kvprobe.patching",
    "KVCache": "kvprobe.cache.cache",
    "LayerMap": "kvprobe.layers",
    "Ledger": "kvprobe.cache.ledger",
    "LogProb": "kvprobe.patching",
    "LogitDiff": "kvprobe.patching",
    "Measured": "kvprobe.inference.measured",
    "Message": "kvprobe.text.messages",
    "Model": "kvprobe.inference.model",
    "Pair": "kvprobe.patching",
    "PairMaps": "kvprobe.patching",
    "Part": "kvprobe.text.messages",
    "PatchMap": "kvprobe.patching",
    "Patterns": "kvprobe.attention",
    "Probe": "kvprobe.probes.probe",
    "Probing": "kvprobe.probing.claims",
    "Run": "kvprobe.experiments.runs",
    "Sample": "kvprobe.tasks.designs",
    "Scene": "kvprobe.policies.policy",
    "Snapshot": "kvprobe.inference.under_policy",
    "Sweep": "kvprobe.inference.sweep",
    "Target": "kvprobe.tasks.designs",
    "Tokens": "kvprobe.text.tokens",
    "Transcript": "kvprobe.text.transcript",
    "Trial": "kvprobe.inference.sweep",
    "UserError": "kvprobe.errors",
    "attend": "kvprobe.attention",
    "attribute": "kvprobe.patching",
    "budget": "kvprobe.memory.budget",
    "common_prefix": "kvprobe.text.prefix",
    "compare": "kvprobe.comparison",
    "examine": "kvprobe.inference.doctor",
    "layer_map": "kvprobe.layers",
    "load": "kvprobe.inference.model",
    "measure": "kvprobe.inference.measured",
    "patch_pairs": "kvprobe.patching",
    "patch_sweep": "kvprobe.patching",
    "probe": "kvprobe.probing.probe",
    "read_chat": "kvprobe.text.chat_file",
    "row_generators": "kvprobe.inference.generate",
    "scan": "kvprobe.probes.scan",
}

_MODULES = {
    "attention": "kvprobe.attention",
    "erasing": "kvprobe.erasing",
    "faults": "kvprobe.faults",
    "layers": "kvprobe.layers",
    "patching": "kvprobe.patching",
    "plots": "kvprobe.report.plots",
    "policies": "kvprobe.policies",
    "routing": "kvprobe.routing",
    "saes": "kvprobe.saes",
    "views": "kvprobe.report.views",
}

__all__ = [
    "KL",
    "Attribution",
    "Budget",
    "Captured",
    "CommonPrefix",
    "Comparison",
    "Design",
    "Generation",
    "KVCache",
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
    "Snapshot",
    "Sweep",
    "Target",
    "Tokens",
    "Transcript",
    "Trial",
    "UserError",
    "attend",
    "attention",
    "attribute",
    "budget",
    "common_prefix",
    "compare",
    "erasing",
    "examine",
    "faults",
    "layer_map",
    "layers",
    "load",
    "measure",
    "patch_pairs",
    "patch_sweep",
    "patching",
    "plots",
    "policies",
    "probe",
    "read_chat",
    "routing",
    "row_generators",
    "saes",
    "scan",
    "views",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("kvprobe")
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        from kvprobe.names import unknown

        raise AttributeError(unknown("name in kvprobe", name, __all__))
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
