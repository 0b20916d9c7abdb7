"""The features study's own figure: both arms' means of each latent."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvprobe.experiments.study import Labels
from kvprobe.probing.intervals import LEVEL
from kvprobe.report.findings import Findings
from kvprobe.report.plots import styled


@dataclass(frozen=True)
class Differences:
    """Mean of each latent in the retained arm against the restart arm: places across, segments down."""

    file: str = "differences"
    caption: str = "Mean activation of each latent in both arms, for the same text at the same positions."

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        segments, places = (findings.values("retained", key) for key in ("segment", "place"))
        if not places:
            return None
        with styled():
            figure, grid = plt.subplots(
                len(segments), len(places), figsize=(3.3 * len(places), 6.2), squeeze=False, layout="constrained"
            )
            for row, segment in enumerate(segments):
                for axis, place in zip(grid[row], places, strict=True):
                    both = findings.where("retained", segment=segment, place=place)
                    known = [
                        [findings.get(name, **each.keys) for name in ("restart", "retained", "p")] for each in both
                    ]
                    restart, retained, p = np.array([[each.mean if each else 1 for each in row] for row in known]).T
                    drawn, differs = (restart > 0) & (retained > 0), p <= LEVEL
                    for some, colour, label in (
                        (drawn & ~differs, "0.7", "no difference found"),
                        (drawn & differs, "#d55e00", f"differs (p ≤ {LEVEL:g}, all latents together)"),
                    ):
                        axis.scatter(restart[some], retained[some], s=7, color=colour, label=label, lw=0)
                    if drawn.any():
                        ends = np.concatenate([restart[drawn], retained[drawn]])
                        axis.plot([ends.min(), ends.max()], [ends.min(), ends.max()], color="0.4", lw=0.8)
                    axis.set(xscale="log", yscale="log", title=f"{place}: {labels('segment', segment)}")
                    axis.set_xlabel("mean activation, restart")
                grid[row, 0].set_ylabel("mean activation, retained")
            handles, names = grid[0, 0].get_legend_handles_labels()
            figure.legend(
                handles, names, loc="outside lower center", ncols=min(2, len(places)), frameon=False, markerscale=2
            )
        return figure
