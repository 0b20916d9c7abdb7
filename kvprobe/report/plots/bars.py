"""Bars over findings: one for each value of a key, with its interval."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.report.findings import Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.said import say
from kvprobe.report.plots.style import styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Bars:
    """A figure of bars.

    Attributes:
        file: its name, without suffix.
        finding: what is drawn.
        along: the key along the x axis.
        y_label: of the y axis.
        caption: of the figure.
        where: the other keys.
    """

    file: str
    finding: str
    along: str
    y_label: str
    caption: str
    where: Mapping[str, Key] = field(default_factory=dict)

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        known = findings.where(self.finding, **self.where)
        if not known:
            return None
        means = np.array([finding.value.mean for finding in known])
        low, high = np.array([finding.value.ends for finding in known]).T
        with styled():
            figure, axis = plt.subplots(figsize=(1.6 + 0.9 * len(known), 3.4))
            bars = np.clip([means - low, high - means], 0, None)
            axis.bar(range(len(known)), means, yerr=bars, width=0.7, color="#56b4e9", ecolor="0.2", capsize=3)
            axis.set_xticks(range(len(known)), [labels(self.along, finding.keys[self.along]) for finding in known])
            axis.set_xlabel(self.along)
            axis.set_ylabel(self.y_label)
            axis.axhline(0, color="black", lw=0.8)
            say(figure, [(axis, known)], labels, title)
            figure.tight_layout()
        return figure
