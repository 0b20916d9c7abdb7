"""What is kept against what it costs: measures of quality against the memory that conditions take."""

from typing import TYPE_CHECKING

from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.lines import Style
from kvprobe.report.plots.style import styled
from kvprobe.stats import Estimate
from kvprobe.studies.policies.collect import FULL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "kl": "KL from the full cache (nats, geometric mean)",
    "agreement": "next token as with the full cache (share)",
    "code": "digits of the hidden code recalled (share)",
    "instructions": "instructions followed (share)",
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


class Tradeoff:
    """A panel for each measure, and a line for each policy from its least memory on; one without dashes is not joined,
    and its points are named by its bits."""

    file = "quality_by_memory"
    caption = (
        "Means over conversations, of KL geometric ones. Grey band: 95 % interval of random eviction; the tables hold "
        "the others. A policy that keeps everything has a KL of zero, which is off the scale."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure":
        import matplotlib.pyplot as plt

        measured = findings.values("memory", "kind")
        with styled():
            figure, grid = plt.subplots(2, 2, figsize=(9.6, 8.0), sharex=True)
            for axis, (measure, y_label) in zip(grid.flat, PANELS.items(), strict=True):
                for name, style in POLICY_STYLES.items():
                    if name in measured:
                        _line(axis, findings, measure, name, style, labels)
                if measure != "kl":
                    whole = findings.at("quality", measure=measure, kind=FULL, level=100)
                    axis.axhline(whole.mean, color="black", ls="--", lw=0.9, label=labels("kind", FULL))
                    axis.set_ylim(-0.02, 1.04)
                elif not all(finding.value.unknown for finding in findings.where("log_kl")):
                    axis.set_yscale("log")
                if level := findings.get("chance", measure=measure):
                    axis.axhline(level.mean, color="black", ls=":", lw=0.9, label="chance")
                axis.set(ylabel=y_label, xlim=(0, 102))
            for axis in grid[-1]:
                axis.set_xlabel("memory kept (% of the full cache at 16 bits)")
            figure.suptitle(title, fontsize=10)
            looks = grid[-1, -1].get_legend_handles_labels()
            figure.legend(*looks, loc="lower center", ncols=4, frameon=False, handlelength=3)
            figure.tight_layout(rect=(0, 0.85 / figure.get_figheight(), 1, 1))
        return figure


def _value(findings: Findings, measure: str, point: Finding) -> Estimate:
    """A measure of the condition of a point, with its ends."""
    if measure != "kl":
        return findings.at("quality", measure=measure, **point.keys)
    return findings.at("log_kl", **point.keys).exponential


def _line(axis: "Axes", findings: Findings, measure: str, name: str, style: Style, labels: Labels) -> None:
    points: list[Finding] = sorted(findings.where("memory", kind=name), key=lambda point: point.value.mean)
    if measure == "kl":
        # A condition that changes nothing is at zero, which a log scale cannot show.
        points = [point for point in points if point.value.mean < 1]
    memory = [100 * point.value.mean for point in points]
    values = [_value(findings, measure, point) for point in points]
    label = labels("kind", name)
    if name == "random":
        lows, highs = zip(*(value.ends for value in values), strict=True)
        axis.fill_between(memory, lows, highs, color=style.colour, alpha=0.2, lw=0, label=f"{label}, 95 % interval")
    axis.plot(
        memory,
        [value.mean for value in values],
        color=style.colour,
        marker=style.marker,
        ls=style.dashes or "none",
        lw=1.3,
        ms=9 if style.marker == "*" else 5,
        label=label,
        zorder=3 if style.dashes else 4,
    )
    if not style.dashes:
        for point, across, value in zip(points, memory, values, strict=True):
            text = str(point.keys["level"])
            axis.annotate(text, (across, value.mean), (5, -9), textcoords="offset points", fontsize=7)
