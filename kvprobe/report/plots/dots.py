"""Dots over findings: panels in which numbers stand one below the other, with their intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.lines import Style
from kvprobe.report.plots.said import Shown, beyond, say
from kvprobe.report.plots.style import styled

Level = tuple[str, str, Mapping[str, Key]]
"""A dashed line: its name, and the finding and keys at which it stands; at zero without a finding."""

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What one panel of `Dots` shows.

    Attributes:
        finding: what is drawn.
        down: the key whose values stand one below the other.
        line: the key of dots of different looks, which may be `down` itself.
        styles: of the values of `line`; others are not drawn.
        label: of the axis.
        where: the other keys; one of several values, where a tuple is given.
        level: see `Level`.
        log: whether the axis is logarithmic.
        scale: panels of one such name have one scale; a scale of its own by default.
        limits: of the axis, which is longer where a number lies beyond; that an interval does is said.
    """

    finding: str
    down: str
    line: str
    styles: Mapping[Any, Style]
    label: str
    where: Mapping[str, Key | tuple[Key, ...]] = field(default_factory=dict)
    level: Level | None = None
    log: bool = False
    scale: str = ""
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Dots:
    """A figure of panels, row by row.

    Attributes:
        file: its name, without suffix.
        caption: of the figure.
        panels: of which three stand side by side, or fewer.
    """

    file: str
    caption: str
    panels: tuple[Panel, ...]

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        """The figure; None where nothing of its first panel was measured."""
        import matplotlib.pyplot as plt

        if self.panels[0].finding not in findings:
            return None
        across = min(3, len(self.panels))
        shape = (-(-len(self.panels) // across), across)
        size = (max(9.0, 3.7 * (across + 1)), 0.9 + 2.8 * shape[0])
        scales: dict[str, Axes] = {}
        with styled():
            figure, grid = plt.subplots(*shape, figsize=size, squeeze=False)
            shown = [
                (axis, _draw(axis, panel, findings, labels))
                for axis, panel in zip(grid.flat, self.panels, strict=False)
            ]
            for axis in grid.flat[len(self.panels) :]:
                axis.set_axis_off()
            for (axis, _), panel in zip(shown, self.panels, strict=True):
                if (first := scales.setdefault(panel.scale or str(id(panel)), axis)) is not axis:
                    low, high = zip(axis.get_xlim(), first.get_xlim(), strict=True)
                    axis.sharex(first)
                    axis.set_xlim(min(low), max(high))
            for axes in grid:
                names = [[text.get_text() for text in axis.get_yticklabels()] for axis in axes]
                for axis, listed in zip(axes[1:], names[1:], strict=True):
                    axis.tick_params(labelleft=listed != names[0])
            named = {
                text: dots for axis, _ in shown for dots, text in zip(*axis.get_legend_handles_labels(), strict=True)
            }
            if named:
                counted = self._counted(shown, labels)
                texts = [f"{text}{counted.get(text, '')}" for text in named]
                figure.legend(named.values(), texts, loc="outside lower center", ncols=5, frameon=False)
            own = "a scale for each panel" if len(scales) == len(self.panels) > 1 else ""
            several = "" if len(scales) == 1 else self._sharing()
            say(figure, shown, labels, title, own, several, beyond(shown, sideways=True))
            figure.set_layout_engine("constrained")
        return figure

    def _sharing(self) -> str:
        """Which panels share a scale."""
        by_scale: dict[str, list[str]] = {}
        for letter, panel in zip(ascii_lowercase, self.panels, strict=False):
            by_scale.setdefault(panel.scale or letter, []).append(letter)
        return "; ".join(f"one scale: {', '.join(those)}" for those in by_scale.values() if len(those) > 1)

    def _counted(self, shown: Sequence[Shown], labels: Labels) -> dict[str, str]:
        """By how dots are called, on how many clusters they rest, if that differs between them and not otherwise."""
        counts: dict[str, set[int]] = {}
        for (_, findings), panel in zip(shown, self.panels, strict=True):
            for finding in findings:
                counts.setdefault(labels(panel.line, finding.keys[panel.line]), set()).add(finding.value.clusters)
        if len(set.union(*counts.values())) == 1 or any(len(each) > 1 for each in counts.values()):
            return {}
        return {name: f" (n = {each.pop()})" for name, each in counts.items()}


def _draw(axis: "Axes", panel: Panel, findings: Findings, labels: Labels) -> list[Finding]:
    """Draws a panel; gives what it shows."""
    known = findings.where(panel.finding, **{**panel.where, panel.line: tuple(panel.styles)})
    down = list(dict.fromkeys(finding.keys[panel.down] for finding in known))
    apart = panel.line != panel.down
    shifts = np.linspace(-0.2, 0.2, len(panel.styles)) if apart else np.zeros(len(panel.styles))
    for (line, style), shift in zip(panel.styles.items(), shifts, strict=True):
        dots = [finding for finding in known if finding.keys[panel.line] == line and not finding.value.unknown]
        if dots:
            means, low, high = np.array([(finding.value.mean, *finding.value.ends) for finding in dots]).T
            axis.errorbar(
                means,
                [down.index(finding.keys[panel.down]) + shift for finding in dots],
                xerr=np.clip([means - low, high - means], 0, None),
                fmt=style.marker,
                color=style.colour,
                ms=5,
                capsize=2.5,
                label=labels(panel.line, line) if apart else None,
            )
    if panel.log:
        axis.set_xscale("log")
    if panel.level:
        name, of, keys = panel.level
        value = findings.get(of, **keys) if of else None
        axis.axvline(value.mean if value else 0.0, color="0.35", ls="--", lw=0.9)
        axis.set_title(name and f"dashed: {name}", fontsize=8, color="0.35")
    axis.set_xlabel(panel.label)
    axis.set_yticks(range(len(down)), [labels(panel.down, value).replace(" (", "\n(") for value in down])
    axis.set_ylim(len(down) - 0.5, -0.5)
    if panel.limits:
        means = [finding.value.mean for finding in known]
        axis.set_xlim(min(panel.limits[0], *means), max(panel.limits[1], *means))
    return known
