"""Findings along the bits of a number as it is stored: a panel for each task and dtype, from the sign to the lowest bit
of the mantissa."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Layer = tuple[str, str, str, str]
"""Of a stack: an outcome, one of which it is cleared (or an empty name), its colour, and its name in the legend."""
ABOVE: Any = {"xycoords": ("data", "axes fraction"), "ha": "center"}


@dataclass(frozen=True, kw_only=True)
class ByBit(ABC):
    """A figure with the bits along the x axis, and panels one below the other.

    Attributes:
        file, caption: of the figure.
        finding: what is drawn, by `task`, `dtype` and `bit`.
        bits: a finding by the same keys that every bit has.
    """

    file: str
    caption: str
    finding: str
    bits: str

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        drawn = findings.where(self.finding)
        places = list(dict.fromkeys((finding.keys["task"], finding.keys["dtype"]) for finding in drawn))
        if not places:
            return None
        several = len({task for task, _ in places}) > 1
        named = {}
        with styled():
            figure, grid = plt.subplots(len(places), 1, figsize=(8.4, 1.1 + 2.3 * len(places)), squeeze=False)
            for axis, (task, dtype) in zip(grid[:, 0], places, strict=True):
                keys = {"task": task, "dtype": dtype}
                bits = findings.values(self.bits, "bit", **keys)[::-1]
                self.panel(axis, findings, keys, bits)
                _name_bits(axis, str(dtype), bits)
                axis.set_ylabel("\n".join([labels("task", task)] * several + [str(dtype), axis.get_ylabel()]))
                named |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
            figure.suptitle(title, fontsize=10)
            figure.legend(named.values(), named.keys(), loc="lower center", ncols=3, frameon=False, handlelength=2.4)
            figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1))
        return figure

    @abstractmethod
    def panel(self, axis: "Axes", findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> None:
        """Draw one task and dtype."""


@dataclass(frozen=True, kw_only=True)
class SharesByBit(ByBit):
    """Shares of outcomes (the key `became`), stacked, with the interval of one of them.

    Attributes:
        stacks: by the outcome whose interval is drawn, what is stacked from below; that of the first outcome that was
            measured counts.
        said: what each of these outcomes did.
    """

    stacks: Mapping[str, Sequence[Layer]]
    said: Mapping[str, str]

    def panel(self, axis: "Axes", findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> None:
        def shares(became: str) -> Any:
            return np.array([findings.at(self.finding, **keys, bit=bit, became=became).mean for bit in bits])

        harm = next(became for became in self.stacks if findings.where(self.finding, **keys, became=became))
        places, bottom = np.arange(len(bits)), np.zeros(len(bits))
        for whole, part, colour, name in self.stacks[harm]:
            heights = shares(whole) - (shares(part) if part else 0)
            axis.bar(places, 100 * heights, 0.86, bottom=100 * bottom, color=colour, label=name, lw=0)
            bottom = bottom + heights
        means = shares(harm)
        low, high = np.array([findings.at(self.finding, **keys, bit=bit, became=harm).ends for bit in bits]).T
        axis.errorbar(
            places,
            100 * means,
            yerr=100 * np.clip([means - low, high - means], 0, None),
            fmt="none",
            ecolor="#7a3300",
            elinewidth=0.9,
            capsize=1.5,
            label=f"interval of what {self.said[harm]}",
        )
        axis.set(ylim=(0, 100), ylabel="share of flips (%)")


@dataclass(frozen=True, kw_only=True)
class PointsByBit(ByBit):
    """Numbers with their intervals, on a logarithmic axis.

    Attributes:
        left_out: a finding with the same keys: how many flips have no number, which is written above.
        y_label: of the y axis.
        limits: of the y axis; what is less than twice the lower one is drawn there.
        label: of the points in the legend.
    """

    left_out: str
    y_label: str
    limits: tuple[float, float]
    label: str

    def panel(self, axis: "Axes", findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> None:
        for place, bit in enumerate(bits):
            value = findings.get(self.finding, **keys, bit=bit)
            if value is not None:
                mean, low, high = np.maximum([value.mean, *value.ends], 2 * self.limits[0])
                axis.plot([place, place], [low, high], color="#0072b2", lw=1.2)
                axis.plot(place, mean, "o", color="#0072b2", ms=4, label=self.label)
            left_out = findings.at(self.left_out, **keys, bit=bit).mean
            if left_out:
                axis.annotate(f"{left_out:g}", (place, 0.985), va="top", color="#d55e00", fontsize=7.5, **ABOVE)
        axis.set(yscale="log", ylim=self.limits, ylabel=self.y_label)


def _name_bits(axis: "Axes", dtype: str, bits: Sequence[Key]) -> None:
    """Number the bits, and write above which field they belong to."""
    axis.set_xticks(range(len(bits)), [str(bit) for bit in bits])
    axis.tick_params(axis="x", labelsize=7.5, length=2)
    axis.set_xlim(-0.6, len(bits) - 0.4)
    axis.set_xlabel("bit (the lowest of the mantissa is 0)")
    start = 0
    for field, members in groupby(bits, key=lambda bit: LAYOUTS[dtype].field_of(int(bit))):
        stop = start + len(list(members))
        if start:
            axis.axvline(start - 0.5, color="black", lw=0.9, ls=(0, (4, 2)))
        axis.annotate(field, ((start + stop - 1) / 2, 1.03), va="bottom", fontsize=8, **ABOVE)
        start = stop
