"""Findings along the bits of a number as it is stored: a panel for each task and dtype, from the sign to the lowest bit
of the mantissa."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.said import Shown, say
from kvprobe.report.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STACKS = {
    "breaks": (
        ("loud", "", "#222222", "breaks: not finite"),
        ("breaks", "loud", "#d55e00", "breaks: wrong answer"),
        ("words", "", "#56b4e9", "other words, still right"),
        ("nothing", "", "#e3e3e3", "nothing: same answer"),
    ),
    "changed": (
        ("nonfinite", "", "#222222", "not finite"),
        ("different", "", "#d55e00", "another answer"),
        ("same", "", "#e3e3e3", "same answer"),
    ),
}
"""What is stacked from below where answers can break, and where the model fails at the task, by the outcome whose
interval is drawn: an outcome, one of which it is cleared (or an empty name), its colour, and its name in the legend."""
DID = {"breaks": "breaks", "changed": "differs"}
LIMITS = (5e-11, 100.0)
"""Of the axis of KL; what is less than twice the lower one is drawn there."""
ABOVE: Any = {"xycoords": ("data", "axes fraction"), "ha": "center"}


class ByBit(ABC):
    """A figure of a finding by `task`, `dtype` and `bit`: bits along the x axis, panels one below the other."""

    file: str
    caption: str
    finding: str

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        drawn = findings.where(self.finding)
        places = list(dict.fromkeys((finding.keys["task"], finding.keys["dtype"]) for finding in drawn))
        if not places:
            return None
        several = len({task for task, _ in places}) > 1
        named, shown = {}, list[Shown]()
        with styled():
            figure, grid = plt.subplots(len(places), 1, figsize=(8.4, 1.1 + 2.3 * len(places)), squeeze=False)
            for axis, (task, dtype) in zip(grid[:, 0], places, strict=True):
                keys = {"task": task, "dtype": dtype}
                bits = findings.values("bit_flips", "bit", **keys)[::-1]
                shown.append((axis, self.panel(axis, findings, keys, bits)))
                _name_bits(axis, str(dtype), bits)
                axis.set_ylabel("\n".join([labels("task", task)] * several + [str(dtype), axis.get_ylabel()]))
                named |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
            say(figure, shown, labels, title)
            figure.legend(named.values(), named.keys(), loc="lower center", ncols=3, frameon=False, handlelength=2.4)
            figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1))
        return figure

    @abstractmethod
    def panel(self, axis: "Axes", findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> list[Finding]:
        """Draw one task and dtype; gives what has an interval."""


class SharesByBit(ByBit):
    """Shares of outcomes (the key `became`), stacked, with the interval of the first of `STACKS` that was measured."""

    file = "shares_by_bit"
    caption = (
        "What a single flip of each bit does: of answers that were right, or of all answers where the model fails at "
        "the task. The same places are struck at each bit. 95 % intervals over items."
    )
    finding = "bit_share"

    def panel(self, axis: "Axes", findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> list[Finding]:
        def shares(became: str) -> Any:
            return np.array([findings.at(self.finding, **keys, bit=bit, became=became).mean for bit in bits])

        harm, known = next(
            (became, known) for became in STACKS if (known := findings.where(self.finding, **keys, became=became))
        )
        places, bottom = np.arange(len(bits)), np.zeros(len(bits))
        for whole, part, colour, name in STACKS[harm]:
            heights = shares(whole) - (shares(part) if part else 0)
            label = name if heights.any() else None
            axis.bar(places, 100 * heights, 0.86, bottom=100 * bottom, color=colour, label=label, lw=0)
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
            label=f"interval of what {DID[harm]}",
        )
        axis.set(ylim=(0, 100), ylabel="share of flips (%)")
        return known


class KLByBit(ByBit):
    """KL with its intervals, on a logarithmic axis; how many flips have none is written above."""

    file = "kl_by_bit"
    caption = (
        "Flips after which numbers were not finite have no KL; how many these are is written above. A change too small "
        "to matter still moves what is computed by rounding; the KL of the lowest bits shows how much. 95 % intervals "
        "over items."
    )
    finding = "bit_kl"

    def panel(self, axis: "Axes", findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> list[Finding]:
        for place, bit in enumerate(bits):
            value = findings.get(self.finding, **keys, bit=bit)
            if value is not None:
                mean, low, high = np.maximum([value.mean, *value.ends], 2 * LIMITS[0])
                axis.plot([place, place], [low, high], color="#0072b2", lw=1.2)
                axis.plot(place, mean, "o", color="#0072b2", ms=4, label="mean over flips and items, with its interval")
            left_out = findings.at("bit_nonfinite", **keys, bit=bit).mean
            if left_out:
                axis.annotate(f"{left_out:g}", (place, 0.985), va="top", color="#d55e00", fontsize=7.5, **ABOVE)
        axis.set(yscale="log", ylim=LIMITS, ylabel="KL (nats per token)")
        return findings.where(self.finding, **keys)


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
