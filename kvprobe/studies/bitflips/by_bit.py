"""Figures of single flips: a panel for each task and dtype, from the sign to the lowest bit of the mantissa."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots import styled
from kvprobe.report.plots.figure import Labels

LOUD, BREAKS, WORDS, NOTHING, KL = "#222222", "#d55e00", "#56b4e9", "#e3e3e3", "#0072b2"
STACK_OF_RIGHT = (
    (("loud",), LOUD, "breaks: not finite"),
    (("breaks", "loud"), BREAKS, "breaks: wrong answer"),
    (("words",), WORDS, "other words, still right"),
    (("nothing",), NOTHING, "nothing: same answer"),
)
"""What is stacked, from below: a share, or a share less another; its colour and its name."""
STACK_OF_ALL = (
    (("nonfinite",), LOUD, "not finite"),
    (("different",), BREAKS, "another answer"),
    (("same",), NOTHING, "same answer"),
)
ABOVE: Any = {"xycoords": ("data", "axes fraction"), "ha": "center"}
LEAST_KL = 1e-10
"""Nats below which a KL is drawn at the lower edge: float32 holds no less."""


@dataclass(frozen=True)
class ByBit:
    """A figure with a panel for each task and dtype, one below the other, and the bits along the x axis.

    Attributes:
        file, caption: of the figure.
        finding: without which there is nothing to draw: `bit_share` or `bit_kl`.
    """

    file: str
    caption: str
    finding: str

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        places = list(
            dict.fromkeys((finding.keys["task"], finding.keys["dtype"]) for finding in findings.where(self.finding))
        )
        if not places:
            return None
        paint = {"bit_share": _shares, "bit_kl": _kl}[self.finding]
        several = len({task for task, _ in places}) > 1
        with styled():
            figure, grid = plt.subplots(len(places), 1, figsize=(8.4, 1.1 + 2.3 * len(places)), squeeze=False)
            for axis, (task, dtype) in zip(grid[:, 0], places, strict=True):
                keys = {"task": task, "dtype": dtype}
                bits = findings.values("bit_flips", "bit", **keys)[::-1]
                paint(axis, findings, keys, bits)
                _name_bits(axis, str(dtype), bits)
                axis.set_ylabel("\n".join([labels("task", task)] * several + [str(dtype), axis.get_ylabel()]))
            named = {}
            for axis in grid[:, 0]:
                named |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
            figure.suptitle(title, fontsize=10)
            figure.legend(named.values(), named.keys(), loc="lower center", ncols=3, frameon=False, handlelength=2.4)
            figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1))
        return figure


def _shares(axis: Any, findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> None:
    """What became of answers, stacked, with the interval of what broke or changed."""
    ranked = bool(findings.where("bit_share", **keys, became="breaks"))

    def shares(became: str) -> Any:
        return np.array([findings.at("bit_share", **keys, bit=bit, became=became).mean for bit in bits])

    places, bottom = np.arange(len(bits)), np.zeros(len(bits))
    for (whole, *part), colour, name in STACK_OF_RIGHT if ranked else STACK_OF_ALL:
        heights = shares(whole) - sum(shares(became) for became in part)
        axis.bar(places, 100 * heights, 0.86, bottom=100 * bottom, color=colour, label=name, lw=0)
        bottom = bottom + heights
    harm, said = ("breaks", "breaks") if ranked else ("changed", "differs")
    means = shares(harm)
    low, high = np.array([findings.at("bit_share", **keys, bit=bit, became=harm).ends for bit in bits]).T
    axis.errorbar(
        places,
        100 * means,
        yerr=100 * np.clip([means - low, high - means], 0, None),
        fmt="none",
        ecolor="#7a3300",
        elinewidth=0.9,
        capsize=1.5,
        label=f"interval of what {said}",
    )
    axis.set_ylim(0, 100)
    axis.set_ylabel("share of flips (%)")


def _kl(axis: Any, findings: Findings, keys: Mapping[str, Key], bits: Sequence[Key]) -> None:
    """Mean KL with its interval, and how many flips have none."""
    for place, bit in enumerate(bits):
        value = findings.get("bit_kl", **keys, bit=bit)
        if value is not None:
            mean, low, high = np.maximum([value.mean, *value.ends], LEAST_KL)
            axis.plot([place, place], [low, high], color=KL, lw=1.2)
            axis.plot(place, mean, "o", color=KL, ms=4, label="mean over flips and items, with its interval")
        left_out = findings.at("bit_nonfinite", **keys, bit=bit).mean
        if left_out:
            axis.annotate(f"{left_out:g}", (place, 0.985), va="top", color=BREAKS, fontsize=7.5, **ABOVE)
    axis.set_yscale("log")
    axis.set_ylim(LEAST_KL / 2, 100)
    axis.set_ylabel("KL (nats per token)")


def _name_bits(axis: Any, dtype: str, bits: Sequence[Key]) -> None:
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
