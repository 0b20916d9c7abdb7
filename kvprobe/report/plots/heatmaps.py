"""Heat maps over findings: one key downwards, one across, a panel for each value of a third."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.orientation import is_upward
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.said import means_of, say
from kvprobe.report.plots.style import heat, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Heatmaps:
    """A figure of heat maps on one scale, whose rows go as `kvprobe.report.orientation` says.

    Attributes:
        file, caption: of the figure.
        finding: what is drawn.
        rows, columns, panel: keys; a single panel without the last.
        label: of the colour bar.
        x_label: of what goes across; the name of its key by default.
        where: the other keys; one of several values, where a tuple is given.
        drawn: which values of `panel` are drawn.
        stacked: whether panels stand one below the other.
        middle: the number at the middle of the scale, or the name of the finding that is it.
        within: the share of numbers that the scale spans; those beyond have the colour of its ends.
        written: the format of the number in each cell; none by default.
        marked: which findings have a dot, by their keys.
        edge: how many rows come before a line, by the values of `panel` and `columns`.
    """

    file: str
    caption: str
    finding: str
    rows: str
    columns: str
    panel: str = ""
    label: str
    x_label: str | None = None
    where: Mapping[str, Key | tuple[Key, ...]] = field(default_factory=dict)
    drawn: Callable[[Key], bool] = lambda _: True
    stacked: bool = False
    middle: float | str = 0.0
    within: float = 1.0
    written: str = ""
    marked: Callable[[Mapping[str, Key]], bool] = lambda _: False
    edge: Callable[[Any, Any], float] | None = None

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        known = {
            tuple(finding.keys.get(key, "") for key in (self.panel, self.rows, self.columns)): finding
            for finding in findings.where(self.finding, **self.where)
            if not finding.value.unknown and self.drawn(finding.keys.get(self.panel, ""))
        }
        if not known:
            return None
        panels, down, across = (list(dict.fromkeys(values)) for values in zip(*known, strict=True))
        middle = findings.at(self.middle).mean if isinstance(self.middle, str) else self.middle
        offsets = {place: finding.value.mean - middle for place, finding in known.items()}
        limit = max(1e-6, float(np.quantile(np.abs(list(offsets.values())), self.within)))
        count, long = len(panels), len(across) > 12
        size = (max(7.0, 1.5 + 0.16 * len(across)), 3.8 * count) if self.stacked else (2.6 * count + 0.8, 4.6)
        shape = (count, 1) if self.stacked else (1, count)
        named = [labels(self.columns, column).replace("$", r"\$") for column in across]
        anchored = {"ha": "right", "rotation_mode": "anchor"}
        turned: dict[str, Any] = {"rotation": 90, "size": 6} if long else {"rotation": 35, "size": 8, **anchored}
        upward = is_upward(self.rows)
        with styled():
            figure, grid = plt.subplots(*shape, figsize=size, squeeze=False, sharex=True, sharey=True)
            figure.set_layout_engine("constrained")
            for axis, panel in zip(grid.flat, panels, strict=True):
                numbers = [[offsets.get((panel, row, column), nan) for column in across] for row in down]
                heat(
                    axis,
                    pd.DataFrame(numbers, [labels(self.rows, row) for row in down], named),
                    limit,
                    None,
                    upward=upward,
                )
                for (of_panel, row, column), finding in known.items():
                    if of_panel == panel:
                        dark = abs(finding.value.mean - middle) > 0.6 * limit
                        self._mark(axis, finding, across.index(column) + 0.5, down.index(row) + 0.5, dark)
                if self.edge:
                    below = [self.edge(panel, column) for column in across]
                    axis.stairs(below, range(len(across) + 1), color="#009e73", lw=1.5, baseline=None)
                axis.set(title=labels(self.panel, panel) if self.panel else "", xlabel="", ylabel=self.rows)
                axis.set_xticks([place + 0.5 for place in range(len(across))], named, **turned)
                axis.tick_params(axis="y", rotation=0)
                axis.label_outer()
            for axis in grid[-1]:
                axis.set_xlabel(self.columns if self.x_label is None else self.x_label)
            bar = figure.colorbar(grid[0, 0].collections[0], ax=grid, label=self.label, shrink=0.7)
            bar.ax.yaxis.set_major_formatter(lambda offset, _: f"{round(middle + offset, 9) + 0.0:.4g}")
            lowest, highest = min(0.0, *offsets.values()), max(0.0, *offsets.values())
            bar.ax.set_ylim(max(-limit, lowest), min(limit, highest))  # beyond, shares might be below zero
            shown = [[means_of(finding) for place, finding in known.items() if place[0] == panel] for panel in panels]
            say(figure, list(zip(grid.flat, shown, strict=True)), labels, title, "means")
        return figure

    def _mark(self, axis: "Axes", finding: Finding, across: float, up: float, dark: bool) -> None:
        """The number or the dot of a cell; white where the cell is dark."""
        if self.written:
            number, colour = format(finding.value.mean, self.written), "white" if dark else "black"
            axis.text(across, up, number, ha="center", va="center", fontsize=6, color=colour)
        if self.marked(finding.keys):
            axis.plot(across, up, ".", color="black", ms=4)
