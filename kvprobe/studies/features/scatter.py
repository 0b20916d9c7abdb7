"""Points over findings: one finding against another with the same keys, in panels."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """A figure of points with the diagonal, on logarithmic axes; only what is above zero in both is drawn.

    Attributes:
        file, caption: of the figure.
        across, up: the two findings.
        row, column: keys with a row and a column of panels for each value.
        x_label, y_label: of the axes.
        coloured: a finding with the same keys, which is at most so large where a point has a colour; one that is
            missing counts as larger.
        names: of points without and with a colour.
    """

    file: str
    caption: str
    across: str
    up: str
    row: str
    column: str
    x_label: str
    y_label: str
    coloured: tuple[str, float]
    names: tuple[str, str]

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        rows, columns = (findings.values(self.up, key) for key in (self.row, self.column))
        if not columns:
            return None
        with styled():
            figure, grid = plt.subplots(
                len(rows), len(columns), figsize=(3.3 * len(columns), 3.1 * len(rows)), squeeze=False
            )
            figure.set_layout_engine("constrained")
            for axes, row in zip(grid, rows, strict=True):
                for axis, column in zip(axes, columns, strict=True):
                    self._panel(axis, findings, {self.row: row, self.column: column})
                    panel = f"{labels(self.column, column)}: {labels(self.row, row)}"
                    axis.set(xscale="log", yscale="log", title=panel, xlabel=self.x_label)
                axes[0].set_ylabel(self.y_label)
            figure.suptitle(title, fontsize=10)
            looks = grid[0, 0].get_legend_handles_labels()
            figure.legend(*looks, loc="outside lower center", ncols=min(2, len(columns)), frameon=False, markerscale=2)
        return figure

    def _panel(self, axis: "Axes", findings: Findings, keys: dict[str, Key]) -> None:
        of, most = self.coloured
        points = []
        for finding in findings.where(self.up, **keys):
            others = (findings.get(name, **finding.keys) for name in (self.across, of))
            points.append([finding.value.mean, *(other.mean if other else np.inf for other in others)])
        up, across, decides = np.array(points).T
        drawn = (across > 0) & np.isfinite(across) & (up > 0)
        for some, colour, name in zip((decides > most, decides <= most), ("0.7", "#d55e00"), self.names, strict=True):
            axis.scatter(across[drawn & some], up[drawn & some], s=7, color=colour, label=name, lw=0)
        if drawn.any():
            ends = np.concatenate([across[drawn], up[drawn]])
            axis.plot([ends.min(), ends.max()], [ends.min(), ends.max()], color="0.4", lw=0.8)
