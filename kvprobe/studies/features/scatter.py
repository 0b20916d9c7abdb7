"""Points over findings: the mean activation of each latent in both arms."""

from typing import TYPE_CHECKING

import numpy as np

from kvprobe.probing.intervals import LEVEL
from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.said import Shown, means_of, say
from kvprobe.report.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Scatter:
    """Points with the diagonal, on logarithmic axes, a row of panels for each segment and a column for each place; only
    what is above zero in both arms is drawn, and what differs has a colour."""

    file = "differences"
    caption = "Mean activation of each latent in both arms, for the same text at the same positions."

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        rows, columns = (findings.values("retained", key) for key in ("segment", "place"))
        if not columns:
            return None
        shown: list[Shown] = []
        size = (3.3 * len(columns), 3.1 * len(rows))
        with styled():
            figure, grid = plt.subplots(len(rows), len(columns), figsize=size, squeeze=False)
            figure.set_layout_engine("constrained")
            for axes, row in zip(grid, rows, strict=True):
                for axis, column in zip(axes, columns, strict=True):
                    # The points have no intervals; what is taken from them, and rests on the same, has.
                    shown.append((axis, [means_of(one) for one in findings.where("carried", place=column)]))
                    _panel(axis, findings, {"segment": row, "place": column})
                    panel = f"{labels('place', column)}: {labels('segment', row)}"
                    axis.set(xscale="log", yscale="log", title=panel, xlabel="mean activation, restart")
                axes[0].set_ylabel("mean activation, retained")
            say(figure, shown, labels, title)
            looks = grid[0, 0].get_legend_handles_labels()
            figure.legend(*looks, loc="outside lower center", ncols=min(2, len(columns)), frameon=False, markerscale=2)
        return figure


def _panel(axis: "Axes", findings: Findings, keys: dict[str, Key]) -> None:
    points = []
    for finding in findings.where("retained", **keys):
        others = (findings.get(name, **finding.keys) for name in ("restart", "p"))
        points.append([finding.value.mean, *(other.mean if other else np.inf for other in others)])
    up, across, p = np.array(points).T
    drawn = (across > 0) & np.isfinite(across) & (up > 0)
    for some, colour, name in (
        (p > LEVEL, "0.7", "no difference found"),
        (p <= LEVEL, "#d55e00", f"differs (p ≤ {LEVEL:g}, all latents together)"),
    ):
        axis.scatter(across[drawn & some], up[drawn & some], s=7, color=colour, label=name, lw=0)
    if drawn.any():
        ends = np.concatenate([across[drawn], up[drawn]])
        axis.plot([ends.min(), ends.max()], [ends.min(), ends.max()], color="0.4", lw=0.8)
