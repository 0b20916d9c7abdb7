"""What is kept against what it costs: measures of quality against the memory that conditions take."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.lines import Style
from kvprobe.report.plots.said import Shown, say
from kvprobe.report.plots.style import styled
from kvprobe.studies.policies.collect import FULL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "kl": "KL from the full cache\n(nats, geometric mean)",
    "agreement": "next token as with\nthe full cache (share)",
    "code": "digits of the hidden code\nrecalled (share)",
    "instructions": "instructions followed\n(share)",
}
POLICY_STYLES = {
    "sliding": Style("#56b4e9", "v"),
    "sinks": Style("#0072b2"),
    "sinks-gapped": Style("#0072b2", "s", "--"),
    "random": Style("#7f7f7f", "x"),
    "random-heads": Style("#7f7f7f", "+", "--"),
    "random-sinks": Style("#7f7f7f", "o", ":"),
    "h2o": Style("#009e73", "^"),
    "tova": Style("#cc79a7", "D"),
    "snapkv": Style("#d55e00"),
    "pyramidkv": Style("#d55e00", "s", "--"),
    "adakv": Style("#d55e00", "^", ":"),
    "quantise": Style("#000000", "*", ""),
    "sinks-quantised": Style("#e69f00", "P"),
}
"""A style for each entry of `kvprobe.policies.catalogue.CATALOGUE`."""


GROUPS = {
    "recent slots": ("sliding", "sinks", "sinks-gapped"),
    "slots by chance": ("random-heads", "random-sinks"),
    "slots by attention": ("h2o", "tova", "snapkv", "pyramidkv", "adakv"),
    "fewer bits": ("quantise", "sinks-quantised"),
}
"""Policies whose lines share a panel, beside those of `REFERENCE`."""
REFERENCE = "random"


class Tradeoff:
    """A row of panels for each measure, a column for each group of policies, and a line for each policy from its least
    memory on; one without dashes is not joined, and its points in the first row are named by its bits."""

    file = "quality_by_memory"
    caption = (
        "Means over conversations with 95 % intervals, of KL geometric ones. Grey, in every panel: random eviction. "
        "Dashed: the full cache; dotted: chance. A policy that keeps everything has a KL of zero, which is off the "
        "scale."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure":
        import matplotlib.pyplot as plt

        measured = set(findings.values("memory", "kind"))
        groups = {name: kinds for name, kinds in GROUPS.items() if measured & set(kinds)} or {"": ()}
        shape = (len(PANELS), len(groups))
        shown: list[Shown] = []
        with styled():
            figure, grid = plt.subplots(
                *shape, figsize=(1 + 3.1 * len(groups), 11), sharex=True, sharey="row", squeeze=False
            )
            for axes, (measure, y_label) in zip(grid, PANELS.items(), strict=True):
                axes[0].set_ylabel(y_label)
                for axis, (group, kinds) in zip(axes, groups.items(), strict=True):
                    drawn = [name for name in (REFERENCE, *kinds) if name in measured]
                    lines = [_line(axis, findings, measure, name, labels) for name in drawn]
                    shown.append((axis, [point for line in lines for point in line]))
                    _levels(axis, findings, measure, labels)
                    axis.set_title(group if axis in grid[0] else "")
            for axis in grid[-1]:
                axis.set(xlabel="memory kept (% of the full cache, 16 bits)", xlim=(0, 102))
                axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False, handlelength=3)
            say(figure, shown, labels, title, "one scale in each row")
            figure.tight_layout()
        return figure


def _levels(axis: "Axes", findings: Findings, measure: str, labels: Labels) -> None:
    """The full cache, chance, and the scale."""
    if measure != "kl":
        whole = findings.at("quality", measure=measure, kind=FULL, level=100)
        axis.axhline(whole.mean, color="black", ls="--", lw=0.9, label=labels("kind", FULL))
        axis.set_ylim(-0.03, 1.04)
    elif not all(finding.value.unknown for finding in findings.where("log_kl")):
        axis.set_yscale("log")
    if level := findings.get("chance", measure=measure):
        axis.axhline(level.mean, color="black", ls=":", lw=0.9, label="chance")


def _shown(findings: Findings, measure: str, point: Finding) -> Finding:
    """A measure of the condition of a point."""
    if measure != "kl":
        return findings.finding("quality", measure=measure, **point.keys)
    logarithm = findings.finding("log_kl", **point.keys)
    return replace(logarithm, value=logarithm.value.exponential)


def _line(axis: "Axes", findings: Findings, measure: str, name: str, labels: Labels) -> list[Finding]:
    """Draws a policy; gives what it shows."""
    style = POLICY_STYLES[name]
    points: list[Finding] = sorted(findings.where("memory", kind=name), key=lambda point: point.value.mean)
    if measure == "kl":
        # A condition that changes nothing is at zero, which a log scale cannot show.
        points = [point for point in points if point.value.mean < 1]
    memory = [100 * point.value.mean for point in points]
    shown = [_shown(findings, measure, point) for point in points]
    means, low, high = np.array([(each.value.mean, *each.value.ends) for each in shown]).reshape(-1, 3).T
    axis.errorbar(
        memory,
        means,
        yerr=np.clip([means - low, high - means], 0, None),
        elinewidth=0.8,
        color=style.colour,
        marker=style.marker,
        ls=style.dashes or "none",
        lw=1.3,
        ms=9 if style.marker == "*" else 4.5,
        label=labels("kind", name),
        zorder=3 if style.dashes else 4,
    )
    if not style.dashes and measure == "kl":
        for point, across, mean in zip(points, memory, means, strict=True):
            text = str(point.keys["level"])
            axis.annotate(text, (across, mean), (5, 3), textcoords="offset points", fontsize=7)
    return shown
