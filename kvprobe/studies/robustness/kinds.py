"""The faults of the robustness study by name: what each writes, on what it is drawn, and how its line looks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvprobe.faults import (
    Distractor,
    Fault,
    ForeignBlock,
    Fp8Saturation,
    Fp8Scale,
    Gaussian,
    OverlappingKV,
    Permuted,
    PositionShift,
    QuantisationNoise,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.faults.scope import Parts, Unit

WRITTEN, ENGINE = "other numbers in place of K and V", "pages, order, positions or precision gone wrong"
"""The families of faults: what canarypwn's article writes, with variants, and what goes wrong in engines."""


@dataclass(frozen=True)
class Kind:
    """A fault at all its rates: one line of a figure.

    Attributes:
        label: as figures and tables call it.
        says: what a struck slot holds.
        make: the fault, given `scope`, `at` and `transient`.
        colour: colour, marker and dashes of its line.
        family: the row of figures that it stands in.
        parts: K and V, or one of them.
        paged: whether it strikes blocks; a rate is then a share of blocks, the same in all layers, whatever the unit.
        whole: whether it moves whole vectors, so that drawing single numbers would tear them apart; it then draws slots.
        control: whether it must change nothing where every slot is visible.
    """

    label: str
    says: str
    make: Callable[..., Fault]
    colour: str
    marker: str = "o"
    dashes: str = "-"
    family: str = ENGINE
    parts: Parts = "kv"
    paged: bool = False
    whole: bool = False
    control: bool = False

    def unit(self, wanted: str) -> Unit:
        """What is drawn at once, where the study asks for `wanted`."""
        if self.paged or (self.whole and wanted == "number"):
            return "slot"
        units: dict[str, Unit] = {"slot": "slot", "layer": "layer", "head": "head", "number": "number"}
        return units[wanted]


_RED, _BLUE, _GREEN, _PINK, _ORANGE, _SKY = "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
_SHIFT, _FACTOR, _ROOM = 16, 2.0, 0.25

KINDS = {
    "gaussian": Kind(
        "Gaussian (layer)",
        "noise with the mean and deviation of all numbers of the layer's K or V",
        partial(Gaussian, "layer"),
        _RED,
        family=WRITTEN,
    ),
    "gaussian-head": Kind(
        "Gaussian (head)",
        "noise with the mean and deviation of the KV head's K or V",
        partial(Gaussian, "head"),
        _RED,
        "s",
        "--",
        WRITTEN,
    ),
    "gaussian-channel": Kind(
        "Gaussian (channel)",
        "noise with the mean and covariance of the KV head's channels",
        partial(Gaussian, "channel"),
        _RED,
        "^",
        ":",
        WRITTEN,
    ),
    "gaussian-effect": Kind(
        "Gaussian (effect)",
        "noise mixed in until one slot moves each layer's attention output as far",
        partial(Gaussian, "effect"),
        _RED,
        "D",
        "-.",
        WRITTEN,
    ),
    "zeros": Kind("zeros", "zeros in K and V", Zeros, _BLUE, family=WRITTEN),
    "zero-values": Kind("zeros in V", "zeros in V; K stays", Zeros, _BLUE, "s", "--", WRITTEN, "v"),
    "distractor": Kind("distractor", "the slot of an unrelated conversation", Distractor, _GREEN, family=WRITTEN),
    "distractor-matched": Kind(
        "distractor (matched)",
        "the slot of an unrelated conversation, each channel moved and scaled to this cache's mean and deviation",
        partial(Distractor, matched=True),
        _GREEN,
        "s",
        "--",
        WRITTEN,
    ),
    "permuted": Kind(
        "K and V permuted",
        "K and V together of another struck slot",
        Permuted,
        "#7f7f7f",
        "x",
        whole=True,
        control=True,
    ),
    "permuted-keys": Kind("K permuted", "K of another struck slot; V stays", Permuted, _PINK, parts="k", whole=True),
    "pointers-swapped": Kind(
        "blocks swapped",
        "another struck block of 16 slots",
        partial(WrongPointers, pointing="swapped"),
        "#7f7f7f",
        "+",
        "--",
        paged=True,
        control=True,
    ),
    "pointers-repeated": Kind(
        "blocks read twice",
        "another block of 16 slots of the same prompt",
        partial(WrongPointers, pointing="repeated"),
        _ORANGE,
        paged=True,
    ),
    "foreign-block": Kind(
        "foreign blocks", "16 slots of an unrelated conversation", ForeignBlock, _SKY, "s", paged=True
    ),
    "stale-block": Kind(
        "stale blocks",
        "a block of 16 whose end, from a drawn slot on, is that of an unrelated conversation",
        StaleBlock,
        _SKY,
        "D",
        "--",
        paged=True,
    ),
    "overlapping": Kind("V over K", "V in both K and V, in blocks of 16", OverlappingKV, "#000000", "v", paged=True),
    "shifted": Kind(
        f"K {_SHIFT} positions on",
        f"K turned as if its token stood {_SHIFT} positions further on",
        partial(PositionShift, _SHIFT),
        _PINK,
        "D",
        "--",
        whole=True,
    ),
    "fp8-scale": Kind(
        f"fp8, scale × {_FACTOR:g}",
        f"K and V in fp8 (e4m3), read at {_FACTOR:g} times their scale",
        partial(Fp8Scale, _FACTOR),
        _GREEN,
        "^",
    ),
    "fp8-saturated": Kind(
        "fp8, saturated",
        f"K and V in fp8 (e4m3), cut off at {_ROOM:g} of the layer's largest number",
        partial(Fp8Saturation, _ROOM),
        _GREEN,
        "P",
        "--",
    ),
    "rounded-2-bit": Kind(
        "2 bits", "K and V rounded to 2 bits, in groups of 32 channels", partial(QuantisationNoise, 2), _BLUE, "<"
    ),
    "rounded-4-bit": Kind(
        "4 bits",
        "K and V rounded to 4 bits, in groups of 32 channels",
        partial(QuantisationNoise, 4),
        _BLUE,
        ">",
        "--",
    ),
}
"""Every fault of the study by name. To add one, add an entry."""

SEED_FAULTS = ("gaussian", "zeros", "distractor")
"""Those of canarypwn's article."""
