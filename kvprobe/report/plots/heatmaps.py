"""Heat maps over findings: one key downwards, one across, a panel for each value of a third."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any

import pandas as pd

from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots.style import heat, styled


@dataclass(frozen=True, kw_only=True)
class Heatmaps:
    """A figure of heat maps on one scale around zero, the first row of each at the bottom.

    Attributes:
        file, caption: of the figure.
        finding: what is drawn.
        rows, columns, panel: keys.
        label: of the colour bar.
        where: the other keys.
        drawn: which values of `panel` are drawn.
        stacked: whether panels stand one below the other.
    """

    file: str
    caption: str
    finding: str
    rows: str
    columns: str
    panel: str
    label: str
    where: Mapping[str, Key] = field(default_factory=dict)
    drawn: Callable[[Key], bool] = lambda _: True
    stacked: bool = False

    def draw(self, findings: Findings, labels: Callable[[str, Key], str], title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        known = {
            tuple(finding.keys[key] for key in (self.panel, self.rows, self.columns)): finding.value.mean
            for finding in findings.where(self.finding, **self.where)
            if not finding.value.unknown and self.drawn(finding.keys[self.panel])
        }
        if not known:
            return None
        panels, down, across = (list(dict.fromkeys(values)) for values in zip(*known, strict=True))
        limit = max(1e-6, *map(abs, known.values()))
        count, long = len(panels), len(across) > 12
        size = (max(7.0, 1.5 + 0.16 * len(across)), 3.8 * count) if self.stacked else (2.6 * count + 0.8, 4.6)
        shape = (count, 1) if self.stacked else (1, count)
        with styled():
            figure, grid = plt.subplots(*shape, figsize=size, squeeze=False, sharex=True, sharey=True)
            figure.set_layout_engine("constrained")
            for axis, panel in zip(grid.flat, panels, strict=True):
                numbers = [[known.get((panel, row, column), nan) for column in across] for row in down]
                named = [labels(self.columns, column).replace("$", r"\$") for column in across]
                heat(axis, pd.DataFrame(numbers, [labels(self.rows, row) for row in down], named), limit, None)
                axis.set(title=labels(self.panel, panel), xlabel="", ylabel=self.rows)
                axis.set_xticks([place + 0.5 for place in range(len(across))], named)
                axis.tick_params(axis="x", rotation=90 if long else 35, labelsize=6 if long else 8)
                axis.tick_params(axis="y", rotation=0)
                axis.label_outer()
            grid[0, 0].invert_yaxis()
            grid[-1, 0].set_xlabel(self.columns)
            figure.colorbar(grid[0, 0].collections[0], ax=grid, label=self.label, shrink=0.7)
            figure.suptitle(title, fontsize=10)
        return figure
