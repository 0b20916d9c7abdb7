"""The compaction study's own figures: outcomes side by side, and where attention goes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots import styled
from kvprobe.stats import Estimate

SHOWN = ("kl", "agreement", "right_summary", "margin", "paired", "prefix_hidden")
COLOURS = ("#7f7f7f", "#cc79a7", "#e69f00", "#0072b2")
Labels = Callable[[str, Key], str]


@dataclass(frozen=True)
class Dots:
    """A panel for each outcome, in which numbers stand one below the other.

    Attributes:
        along: the key of the numbers of a panel.
        values: of it, from the top.
        look: colour, marker and face of a number.
        levels: dashed lines: their name, and the finding at which they stand; zero without one.
    """

    file: str
    caption: str
    finding: str
    along: str
    values: tuple[str, ...]
    look: Callable[[Finding], Mapping[str, str]]
    levels: Mapping[str, tuple[str, str, Mapping[str, Key]]] = field(default_factory=dict)

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt

        if self.finding not in findings:
            return None
        with styled():
            figure, grid = plt.subplots(2, 3, figsize=(11, 5.4), sharey=True)
            for axis, outcome in zip(grid.flat, SHOWN, strict=True):
                for place, value in enumerate(self.values):
                    found = findings.find(self.finding, outcome=outcome, **{self.along: value})
                    if found is not None and not found.value.unknown:
                        error = [[abs(end - found.value.mean)] for end in found.value.ends]
                        axis.errorbar([found.value.mean], [place], xerr=error, capsize=2.5, ms=5.5, **self.look(found))
                if outcome in self.levels:
                    name, of, keys = self.levels[outcome]
                    axis.axvline((findings.get(of, **keys) or Estimate(0.0)).mean, color="0.35", ls="--", lw=0.9)
                    axis.set_title(name and f"dashed: {name}", fontsize=8, color="0.35")
                axis.set_xlabel(labels("outcome", outcome))
                axis.set_yticks(range(len(self.values)), [labels(self.along, value) for value in self.values])
                axis.set_ylim(len(self.values) - 0.5, -0.5)
            figure.suptitle(title, fontsize=10)
            figure.tight_layout()
        return figure


@dataclass(frozen=True)
class Dangling:
    """Attention spent on the hidden turns while they are in view, by head; and where it goes when they are masked."""

    file: str = "dangling"
    caption: str = (
        "Left: T3's attention on the hidden turns while they are in view. Right: the same by layer (black), and by how "
        "much more is spent elsewhere when they are masked; shaded: intervals over conversations."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        """The figure; None where nothing of it was measured."""
        import matplotlib.pyplot as plt
        import seaborn as sns

        if "spent_by_head" not in findings:
            return None
        heads = findings.frame("spent_by_head").pivot(index="layer", columns="head", values="mean")
        lines = {"spent on the hidden turns": ("black", findings.where("spent_by_layer"))}
        for colour, place in zip(COLOURS, findings.values("went_by_layer", "place"), strict=True):
            lines[f"after masking: {place}"] = colour, findings.where("went_by_layer", place=place)
        with styled():
            figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), width_ratios=(1, 1.4))
            sns.heatmap(heads, ax=left, cmap="rocket_r", vmin=0, cbar_kws={"label": "share of attention"})
            left.invert_yaxis()
            left.tick_params(axis="y", rotation=0)
            for label, (colour, found) in lines.items():
                numbers = [(float(each.keys["layer"]), each.value.mean, *each.value.ends) for each in found]
                layers, means, low, high = np.array(numbers).T
                right.plot(layers, means, color=colour, label=label)
                right.fill_between(layers, low, high, color=colour, alpha=0.15, lw=0)
            right.axhline(0, color="0.35", lw=0.9)
            right.set_xlabel("layer")
            right.set_ylabel("share of attention")
            right.legend(frameon=False, fontsize=8)
            figure.suptitle(title, fontsize=10)
            figure.tight_layout()
        return figure
