"""The figure of the dangling study that no declaration of the framework draws."""

from typing import Any

import numpy as np

from kvprobe.experiments.study import Labels
from kvprobe.report.findings import Findings
from kvprobe.report.plots import styled
from kvprobe.studies.dangling.conclude import PLACES

COLOURS = dict(zip(PLACES, ("#7f7f7f", "#009e73", "#0072b2", "#e69f00"), strict=True))


class Went:
    """What each part of the cache gains, layer by layer, mean over heads."""

    file = "went"
    caption = (
        "The attention that each part of the cache gains when the turn is hidden, layer by layer. Dots: what was spent "
        "on the turn before. Means over heads and conversations."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        import matplotlib.pyplot as plt

        if "head_gained" not in findings:
            return None
        heads: Any = findings.frame("head_gained")
        gained = heads.groupby(["layer", "place"])["mean"].mean().unstack()
        spent: Any = findings.frame("head_mass").groupby("layer")["mean"].mean()
        above, below = np.zeros(len(spent)), np.zeros(len(spent))
        with styled():
            figure, axis = plt.subplots(figsize=(8.6, 3.2), layout="constrained")
            for place, colour in COLOURS.items():
                own = gained[place].to_numpy()
                bottom = np.where(own >= 0, above, below)
                axis.bar(gained.index, own, bottom=bottom, color=colour, label=labels("place", place))
                above, below = above + own.clip(min=0), below + own.clip(max=0)
            axis.plot(spent.index, spent, "k.", ms=4, label="spent on the turn before")
            axis.axhline(0, color="0.4", lw=0.8)
            axis.locator_params("x", integer=True)
            axis.set_xlabel("layer")
            axis.set_ylabel("attention gained")
            axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
            axis.set_title(title)
        return figure
