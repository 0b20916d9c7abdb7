"""The multihop study's own figures: grids of shares, with the edge of the light cone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprobe.experiments.estimands import chosen
from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots import ARM_COLOURS, styled
from kvprobe.studies.multihop.arms import ARMS, DISTANCES, lowest_layer


@dataclass(frozen=True, kw_only=True)
class Grids:
    """Means of findings by two keys, arms across; one scale for each row of grids, the first row at the bottom.

    Attributes:
        finding: a share.
        rows, columns: keys.
        axes: their names.
        down: a key with a row of grids for each value.
        where: the other keys.
        pale: what is drawn palest.
        edge: how far the edge of the light cone, drawn as a line, is moved down; none is drawn without.
    """

    file: str
    caption: str
    finding: str
    rows: str
    columns: str
    axes: tuple[str, str]
    down: str
    label: str
    where: Mapping[str, Key] = field(default_factory=dict)
    pale: float = 0.0
    edge: int | None = None

    def draw(self, findings: Findings, labels: Callable[[str, Key], str], title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt
        import seaborn as sns

        down = findings.values(self.finding, self.down, **self.where)
        if not down:
            return None
        with styled():
            figure, grid = plt.subplots(
                len(down), len(ARMS), figsize=(10.5, 1.0 + 3.2 * len(down)), squeeze=False, layout="constrained"
            )
            for axes, value in zip(grid, down, strict=True):
                table = chosen(findings.frame(self.finding), {**self.where, self.down: value})
                for axis, arm in zip(axes, ARMS, strict=True):
                    numbers = 100 * table[table["arm"] == arm].pivot(
                        index=self.rows, columns=self.columns, values="mean"
                    )
                    sns.heatmap(
                        numbers,
                        ax=axis,
                        vmin=100 * self.pale,
                        vmax=100 * max(self.pale + 0.1, table["mean"].max()),
                        cmap="rocket_r",
                        annot=self.edge is None,
                        fmt=".0f",
                        annot_kws={"size": 7},
                        cbar=arm == ARMS[-1],
                        cbar_kws={"label": f"{self.label}, {labels(self.down, value)}"},
                    )
                    if self.edge is not None:
                        lowest = [lowest_layer(arm, distance) - self.edge for distance in DISTANCES]
                        axis.stairs(lowest, range(len(lowest) + 1), color=ARM_COLOURS["restart"], lw=1.5, baseline=None)
                        axis.invert_yaxis()
                    axis.set(title=labels("arm", arm), xlabel=self.axes[1], ylabel=self.axes[0])
                    axis.tick_params(rotation=0)
                    axis.label_outer()
            figure.suptitle(title, fontsize=10)
        return figure
