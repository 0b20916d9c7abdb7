"""What is kept against what it costs: measures of quality against the memory that conditions take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.lines import Style
from kvprobe.report.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Tradeoff:
    """A figure with a panel for each measure, and a line for each kind of condition from its least memory on.

    Attributes:
        file, caption: of the figure.
        quality, memory: findings; the keys of `memory`, a share that is written in percent, and `measure` are those of
            `quality`.
        line: the key of which each value is a line.
        panels: measures and what their y axis is called.
        logarithmic: the measure whose axis is logarithmic, and which is zero where nothing is lost; others are shares.
        styles: of lines, by value of their key, in the order in which they are drawn; one without dashes is not joined.
        full: keys of the condition with all memory, drawn dashed.
        level: a finding by `measure`, drawn dotted.
        shaded: the line whose 95 % interval is drawn.
        named: a key whose value is written beside the points of these lines.
        x_label: of the x axes.
    """

    file: str
    caption: str
    quality: str
    memory: str
    line: str
    panels: Mapping[str, str]
    logarithmic: str
    styles: Mapping[str, Style]
    full: Mapping[str, Key]
    level: str
    shaded: str
    x_label: str
    named: Mapping[str, str] = field(default_factory=dict)

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure":
        """The figure."""
        import matplotlib.pyplot as plt

        measured = findings.values(self.memory, self.line)
        with styled():
            figure, grid = plt.subplots(2, -(-len(self.panels) // 2), figsize=(9.6, 8.0), sharex=True, squeeze=False)
            for axis, (measure, y_label) in zip(grid.flat, self.panels.items(), strict=True):
                for name, style in self.styles.items():
                    if name in measured:
                        self._line(axis, findings, measure, name, style, labels)
                if measure != self.logarithmic:
                    whole = findings.at(self.quality, measure=measure, **self.full)
                    label = labels(self.line, self.full[self.line])
                    axis.axhline(whole.mean, color="black", ls="--", lw=0.9, label=label)
                    axis.set_ylim(-0.02, 1.04)
                elif any(finding.value.mean > 0 for finding in findings.where(self.quality, measure=measure)):
                    axis.set_yscale("log")
                if level := findings.get(self.level, measure=measure):
                    axis.axhline(level.mean, color="black", ls=":", lw=0.9, label=self.level)
                axis.set(ylabel=y_label, xlim=(0, 102))
            for axis in grid[-1]:
                axis.set_xlabel(self.x_label)
            figure.suptitle(title, fontsize=10)
            looks = grid[-1, -1].get_legend_handles_labels()
            figure.legend(*looks, loc="lower center", ncols=4, frameon=False, handlelength=3)
            figure.tight_layout(rect=(0, 0.85 / figure.get_figheight(), 1, 1))
        return figure

    def _line(self, axis: "Axes", findings: Findings, measure: str, name: str, style: Style, labels: Labels) -> None:
        points: list[Finding] = findings.where(self.memory, **{self.line: name})
        points = sorted(points, key=lambda point: point.value.mean)
        if measure == self.logarithmic:
            # A condition that changes nothing is at zero, which a log scale cannot show.
            points = [point for point in points if point.value.mean < 1]
        memory = [100 * point.value.mean for point in points]
        values = [findings.at(self.quality, measure=measure, **point.keys) for point in points]
        label = labels(self.line, name)
        if name == self.shaded:
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
        if name in self.named:
            for point, across, value in zip(points, memory, values, strict=True):
                text = str(point.keys[self.named[name]])
                axis.annotate(text, (across, value.mean), (5, -9), textcoords="offset points", fontsize=7)
