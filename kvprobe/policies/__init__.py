"""Every cache policy that people deploy, one file each; see `kvprobe.policies.policy` for what a policy is."""

from kvprobe.policies.attention import Attention
from kvprobe.policies.budgets import HeadBudgets, LayerBudgets
from kvprobe.policies.h2o import H2O
from kvprobe.policies.mask_spans import MaskSpans
from kvprobe.policies.policy import Chain, Policy, Scene, Scored
from kvprobe.policies.prune_tools import PruneToolResults
from kvprobe.policies.quantise import Quantise
from kvprobe.policies.random_eviction import RandomEviction
from kvprobe.policies.restart import RestartInPlace, RestartRebuilt
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
