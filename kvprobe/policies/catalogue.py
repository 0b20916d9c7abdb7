"""The catalogue of named policies: each at any budget, as tables and figures of quality for memory hold them side by
side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvprobe.policies.h2o import H2O
from kvprobe.policies.head_budgets import HeadBudgets
from kvprobe.policies.layer_budgets import LayerBudgets
from kvprobe.policies.policy import Policy
from kvprobe.policies.quantise import Quantise
from kvprobe.policies.random_eviction import RandomEviction
from kvprobe.policies.sink_window import SinkWindow
from kvprobe.policies.sliding_window import SlidingWindow
from kvprobe.policies.snapkv import SnapKV
from kvprobe.policies.tova import TOVA

SINKS, WINDOW, TAIL = 4, 16, 32
"""Slots at the start that sink windows keep, last queries that SnapKV looks at, and slots that stay unquantised."""


@dataclass(frozen=True)
class NamedPolicy:
    """A policy at any budget, under the name by which tables and figures call it.

    Attributes:
        label: short name, for tables and figures.
        make: the policy, from slots to keep (bits, where there are `bits`) and the seed of random eviction.
        bits: at which it is measured instead of budgets, where it keeps all slots.
        rounds: whether it changes numbers, so that it is not the full cache even if it keeps every slot.
        baseline: whether it knows nothing of what it evicts, and is there for others to be held against.
    """

    label: str
    make: Callable[[int, int], Policy]
    bits: tuple[int, ...] = ()
    rounds: bool = False
    baseline: bool = False

    def at(self, level: int, slots: int, seed: int = 0) -> Policy:
        """The policy for a conversation of so many slots, of which it may keep `level` percent; or with so many
        bits."""
        return self.make(level if self.bits else round(level * slots / 100), seed)


def _random(keep: int, seed: int, *, per_head: bool = False, sinks: int = 0) -> RandomEviction:
    return RandomEviction(keep, seed, per_head=per_head, sinks=sinks)


def _snapkv(keep: int) -> SnapKV:
    # Below two windows of budget, a window may take half of it.
    return SnapKV(keep, window=min(WINDOW, keep // 2))


def _sinks(keep: int) -> SinkWindow:
    return SinkWindow(SINKS, keep - SINKS)


CATALOGUE = {
    "sliding": NamedPolicy("sliding window", lambda keep, _: SlidingWindow(keep)),
    "sinks": NamedPolicy("sinks + window (StreamingLLM)", lambda keep, _: _sinks(keep)),
    "sinks-gapped": NamedPolicy("sinks + window (gapped)", lambda keep, _: replace(_sinks(keep), mode="gapped")),
    "random": NamedPolicy("random eviction", _random, baseline=True),
    "random-heads": NamedPolicy("random eviction per head", partial(_random, per_head=True), baseline=True),
    "random-sinks": NamedPolicy("random eviction + sinks", partial(_random, sinks=SINKS), baseline=True),
    "h2o": NamedPolicy("H2O", lambda keep, _: H2O(keep)),
    "tova": NamedPolicy("TOVA", lambda keep, _: TOVA(keep)),
    "snapkv": NamedPolicy("SnapKV", lambda keep, _: _snapkv(keep)),
    "pyramidkv": NamedPolicy("PyramidKV", lambda keep, _: LayerBudgets(_snapkv(keep))),
    "adakv": NamedPolicy("Ada-KV (SnapKV)", lambda keep, _: HeadBudgets(_snapkv(keep))),
    "quantise": NamedPolicy(
        "quantised (8 to 2 bits)", lambda bits, _: Quantise(bits, tail=TAIL), bits=(8, 4, 3, 2), rounds=True
    ),
    "sinks-quantised": NamedPolicy(
        "sinks + window at 4 bits", lambda keep, _: _sinks(keep) | Quantise(4, tail=TAIL), rounds=True
    ),
}
"""Every named policy. To add one, add an entry."""
