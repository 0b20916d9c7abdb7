"""Lines over findings: one key along the x axis, a line for each value of another, panels for two more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots.style import styled


@dataclass(frozen=True)
class Style:
    """Colour, marker and dashes of a line."""

    colour: str
    marker: str = "o"
    dashes: str = "-"


def _one_row(_: Key) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A figure of lines with intervals; points of one x are drawn side by side.

    Attributes:
        file, caption: of the figure.
        finding: what is drawn.
        x, line, panel: keys: along the axis, one line each, one column of panels each.
        row: the row of panels that a line belongs to, by name; all in one by default.
        where: the other keys, or those values of `line` that are drawn.
        band: a finding by panel alone, drawn as a dashed line with its interval, and its name in the legend.
        level: the same as a dotted line.
        beside: a finding with the same keys, drawn hollow and dashed, and what to add to its names.
        above: a finding by panel alone, by which x is multiplied on a second axis above, and that axis's label.
        x_label, y_label: of the axes.
        log: whether the y axis is logarithmic; the x axis is.
        limits: of the y axis.
        styles: of lines, by value of their key.
    """

    file: str
    caption: str
    finding: str
    x: str
    line: str
    panel: str
    x_label: str
    y_label: str
    styles: Mapping[Any, Style]
    row: Callable[[Key], str] = _one_row
    drawn: Callable[[Key], bool] = lambda _: True
    where: Mapping[str, Key] = field(default_factory=dict)
    band: tuple[str, str] | None = None
    level: tuple[str, str] | None = None
    beside: tuple[str, str] | None = None
    above: tuple[str, str] | None = None
    log: bool = False
    limits: tuple[float, float] | None = None

    def draw(self, findings: Findings, labels: Callable[[str, Key], str], title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        panels = findings.values(self.finding, self.panel, **self.where)
        lines = [line for line in findings.values(self.finding, self.line, **self.where) if self.drawn(line)]
        if not panels:
            return None
        rows = {row: [line for line in lines if self.row(line) == row] for row in dict.fromkeys(map(self.row, lines))}
        rows = rows or {"": []}
        across = [float(x) for x in findings.values(self.finding, self.x, **self.where)]
        with styled():
            figure, grid = plt.subplots(
                len(rows),
                len(panels),
                figsize=(3.0 + max(5.4, 2.9 * len(panels)), 0.5 + 3.0 * len(rows)),
                sharex=True,
                sharey=True,
                squeeze=False,
            )
            for axes, (name, own) in zip(grid, rows.items(), strict=True):
                axes[0].annotate(name, (0, 1.13), xycoords="axes fraction", fontsize=9.5, weight="bold")
                axes[0].set_ylabel(self.y_label)
                for axis, panel in zip(axes, panels, strict=True):
                    axis.set_title(labels(self.panel, panel))
                    self._panel(axis, findings, panel, own, across, labels)
            for axis in grid[-1]:
                axis.set_xlabel(self.x_label)
            figure.suptitle(title, fontsize=10)
            _legends(grid)
            figure.tight_layout(h_pad=2.2)
        return figure

    def _panel(
        self,
        axis: Any,
        findings: Findings,
        panel: Key,
        lines: Sequence[Key],
        across: Sequence[float],
        labels: Callable[[str, Key], str],
    ) -> None:
        keys = {**self.where, self.panel: panel}
        if self.band and (value := findings.get(self.band[0], **keys)):
            axis.axhspan(*value.ends, color="0.92", lw=0, zorder=0)
            axis.axhline(value.mean, color="black", ls="--", lw=0.9, label=self.band[1])
        if self.level and (value := findings.get(self.level[0], **keys)) and value.mean > 0:
            axis.axhline(value.mean, color="black", ls=":", lw=0.9, label=self.level[1])
        for line, shift in zip(lines, _offsets(len(lines), across), strict=True):
            own, name, style = {**keys, self.line: line}, labels(self.line, line), self.styles[line]
            look = {"color": style.colour, "marker": style.marker}
            _points(
                axis, findings, self.finding, self.x, own, shift, ls=style.dashes, lw=1.3, ms=4.5, label=name, **look
            )
            if self.beside:
                finding, added = self.beside
                hollow = {**look, "mfc": "white", "ls": "--", "lw": 0.9, "ms": 5, "label": f"{name}{added}"}
                _points(axis, findings, finding, self.x, own, shift * 1.03, **hollow)
        axis.set_xscale("log")
        axis.set_xticks(across, [f"{x:g}" for x in across], fontsize=7.5)
        axis.set_xticks([], minor=True)
        axis.set_xlim(min(across) / 1.35, max(across) * 1.35)
        if self.above and (value := findings.get(self.above[0], **keys)):
            factor = value.mean
            second = axis.secondary_xaxis("top", functions=(lambda x: x * factor, lambda x: x / factor))
            second.set_xlabel(self.above[1], fontsize=8)
            second.tick_params(labelsize=7.5)
        if self.log:
            axis.set_yscale("log")
        if self.limits:
            axis.set_ylim(*self.limits)


def _points(
    axis: Any, findings: Findings, finding: str, x: str, keys: Mapping[str, Key], shift: float, **look: Any
) -> None:
    """Points with their error bars; where there is no number there is no point."""
    known = [(each.keys[x], each.value) for each in findings.where(finding, **keys) if not each.value.unknown]
    if not known:
        return
    means = np.array([value.mean for _, value in known])
    low, high = np.array([value.ends for _, value in known]).T
    bars = np.clip([means - low, high - means], 0, None)
    axis.errorbar([float(place) * shift for place, _ in known], means, yerr=bars, elinewidth=0.8, **look)


def _offsets(count: int, across: Sequence[float]) -> list[float]:
    """By what the x of each of so many lines is multiplied, so that their intervals do not cover each other."""
    nearest = min((np.log(high / low) for low, high in pairwise(sorted(across))), default=1.0)
    half = min(0.17, 0.3 * nearest)
    return np.exp(np.linspace(-half, half, count)).tolist() if count > 1 else [1.0] * count


def _legends(grid: Any) -> None:
    """Each row's legend to its right."""
    for row in grid:
        named = {label: line for axis in row for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        row[-1].legend(
            named.values(), named.keys(), loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, handlelength=2.6
        )
