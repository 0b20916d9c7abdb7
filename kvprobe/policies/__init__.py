"""Cache policies, one a file: which slots stay, at which positions, and whether they are computed again."""

from kvprobe.policies.attention import Attention
from kvprobe.policies.guard import Guard
from kvprobe.policies.h2o import H2O
from kvprobe.policies.head_budgets import HeadBudgets
from kvprobe.policies.layer_budgets import LayerBudgets
from kvprobe.policies.mask_spans import MaskSpans
from kvprobe.policies.policy import Chain, Policy, Scene
from kvprobe.policies.prune_tools import PruneToolResults
from kvprobe.policies.quantise import Quantise
from kvprobe.policies.random_eviction import RandomEviction
from kvprobe.policies.restart import RestartInPlace, RestartRebuilt
from kvprobe.policies.scored import Scored
from kvprobe.policies.sink_window import SinkWindow
from kvprobe.policies.sliding_window import SlidingWindow
from kvprobe.policies.snapkv import SnapKV
from kvprobe.policies.tova import TOVA
from kvprobe.policies.zero_values import ZeroValues

__all__ = [
    "H2O",
    "TOVA",
    "Attention",
    "Chain",
    "Guard",
    "HeadBudgets",
    "LayerBudgets",
    "MaskSpans",
    "Policy",
    "PruneToolResults",
    "Quantise",
    "RandomEviction",
    "RestartInPlace",
    "RestartRebuilt",
    "Scene",
    "Scored",
    "SinkWindow",
    "SlidingWindow",
    "SnapKV",
    "ZeroValues",
]
