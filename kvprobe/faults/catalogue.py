"""The catalogue of named faults: what each writes, and what its rate is a share of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from kvprobe.faults.donors import Distractor, ForeignBlock, StaleBlock
from kvprobe.faults.fault import Fault
from kvprobe.faults.gaussian import Gaussian
from kvprobe.faults.overlap import OverlappingKV
from kvprobe.faults.paged import WrongPointers
from kvprobe.faults.permuted import Permuted
from kvprobe.faults.position_shift import PositionShift
from kvprobe.faults.precision import Fp8Saturation, Fp8Scale, QuantisationNoise
from kvprobe.faults.scope import Parts, Unit
from kvprobe.faults.zeros import Zeros

WRITTEN, ENGINE = "other numbers in place of K and V", "pages, order, positions or precision gone wrong"
"""The two families of faults: numbers that replace K and V, and errors of inference engines."""


@dataclass(frozen=True)
class NamedFault:
    """A fault at any rate, under the name by which tables and figures call it.

    Attributes:
        label: short name, for tables and figures.
        content: what a struck slot holds, in words.
        make: the fault, from `scope`, `at` and `transient`.
        family: `WRITTEN` or `ENGINE`.
        parts: K and V, or one of them.
        paged: whether it strikes blocks. A rate is then a share of blocks, the same in all layers, whatever the unit.
        whole: whether it moves whole vectors, so that it must draw slots where single numbers are asked for.
        control: whether it must change nothing where every slot is visible.
    """

    label: str
    content: str
    make: Callable[..., Fault]
    family: str = ENGINE
    parts: Parts = "kv"
    paged: bool = False
    whole: bool = False
    control: bool = False

    def unit(self, wanted: str) -> Unit:
        """What is drawn at once, where a study asks for `wanted`."""
        return "slot" if self.paged or (self.whole and wanted == "number") else cast(Unit, wanted)


_SHIFT, _FACTOR, _ROOM = 16, 2.0, 0.25

CATALOGUE = {
    "gaussian": NamedFault(
        "Gaussian (layer)",
        "noise with the mean and deviation of all numbers of the layer's K or V",
        partial(Gaussian, "layer"),
        WRITTEN,
    ),
    "gaussian-head": NamedFault(
        "Gaussian (head)",
        "noise with the mean and deviation of the KV head's K or V",
        partial(Gaussian, "head"),
        WRITTEN,
    ),
    "gaussian-channel": NamedFault(
        "Gaussian (channel)",
        "noise with the mean and covariance of the KV head's channels",
        partial(Gaussian, "channel"),
        WRITTEN,
    ),
    "gaussian-effect": NamedFault(
        "Gaussian (effect)",
        "noise mixed in until one slot moves each layer's attention output as far",
        partial(Gaussian, "effect"),
        WRITTEN,
    ),
    "zeros": NamedFault("zeros", "zeros in K and V", Zeros, WRITTEN),
    "zero-keys": NamedFault("zeros in K", "zeros in K; V stays", Zeros, WRITTEN, "k"),
    "zero-values": NamedFault("zeros in V", "zeros in V; K stays", Zeros, WRITTEN, "v"),
    "distractor": NamedFault("distractor", "the slot of an unrelated conversation", Distractor, WRITTEN),
    "distractor-keys": NamedFault(
        "distractor in K", "K of the slot of an unrelated conversation; V stays", Distractor, WRITTEN, "k"
    ),
    "distractor-values": NamedFault(
        "distractor in V", "V of the slot of an unrelated conversation; K stays", Distractor, WRITTEN, "v"
    ),
    "distractor-matched": NamedFault(
        "distractor (matched)",
        "the slot of an unrelated conversation, each channel moved and scaled to this cache's mean and deviation",
        partial(Distractor, matched=True),
        WRITTEN,
    ),
    "permuted": NamedFault(
        "K and V permuted", "K and V together of another struck slot", Permuted, whole=True, control=True
    ),
    "permuted-keys": NamedFault("K permuted", "K of another struck slot; V stays", Permuted, parts="k", whole=True),
    "pointers-swapped": NamedFault(
        "blocks swapped",
        "another struck block of 16 slots",
        partial(WrongPointers, pointing="swapped"),
        paged=True,
        control=True,
    ),
    "pointers-repeated": NamedFault(
        "blocks read twice",
        "another block of 16 slots of the same prompt",
        partial(WrongPointers, pointing="repeated"),
        paged=True,
    ),
    "foreign-block": NamedFault("foreign blocks", "16 slots of an unrelated conversation", ForeignBlock, paged=True),
    "stale-block": NamedFault(
        "stale blocks",
        "a block of 16 whose end, from a drawn slot on, is that of an unrelated conversation",
        StaleBlock,
        paged=True,
    ),
    "overlapping": NamedFault("V over K", "V in both K and V, in blocks of 16", OverlappingKV, paged=True),
    "shifted": NamedFault(
        f"K {_SHIFT} positions on",
        f"K rotated as if its token stood {_SHIFT} positions further on",
        partial(PositionShift, _SHIFT),
        whole=True,
    ),
    "fp8-scale": NamedFault(
        f"fp8, scale × {_FACTOR:g}",
        f"K and V in fp8 (e4m3), read at {_FACTOR:g} times their scale",
        partial(Fp8Scale, _FACTOR),
    ),
    "fp8-saturated": NamedFault(
        "fp8, saturated",
        f"K and V in fp8 (e4m3), cut off at {_ROOM:g} of the layer's largest number",
        partial(Fp8Saturation, _ROOM),
    ),
    "rounded-2-bit": NamedFault(
        "2 bits", "K and V rounded to 2 bits, in groups of 32 channels", partial(QuantisationNoise, 2)
    ),
    "rounded-4-bit": NamedFault(
        "4 bits", "K and V rounded to 4 bits, in groups of 32 channels", partial(QuantisationNoise, 4)
    ),
}
"""Every named fault. To add one, add an entry."""

REPORTED_FAULTS = ("gaussian", "zeros", "distractor")
"""The faults of "KV Cache is More Robust Than You Think in Large Language Models" (canarypwn)."""
