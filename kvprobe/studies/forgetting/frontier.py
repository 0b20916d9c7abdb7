"""What is left against what it costs: a point for each way."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvprobe.report.findings import Finding, Findings
from kvprobe.report.plots.figure import Labels
from kvprobe.report.plots.lines import Style
from kvprobe.report.plots.said import Shown, say
from kvprobe.report.plots.style import styled
from kvprobe.studies.forgetting.ways import (
    ALL,
    CLOSED,
    ERASED,
    ERRATUM,
    EVICT,
    MASK,
    MATCHED,
    NOTHING,
    OTHER,
    PLACED,
    RESTART,
    STEERED,
    ZERO,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "bits": "read by one who knows the\nconversation (share of the bits)",
    "used": "used by the model (share of\nthe effect in full view)",
    "kl": "KL of other replies from the\nsame text read anew (nats)",
}
COSTS = {
    "cost": "tokens read again",
    "computation": "FLOPs of the model's passes",
    "duration": "seconds",
}
"""Findings along the axes, each as a share of a restart's."""
STYLES = {
    NOTHING: Style("#000000", "D"),
    ERRATUM: Style("#cc79a7", "P"),
    STEERED: Style("#e69f00", "X"),
    ZERO: Style("#d55e00", "v"),
    MASK: Style("#0072b2", "s"),
    EVICT: Style("#56b4e9", "s"),
    CLOSED: Style("#332288", "o"),
    PLACED: Style("#8fd6be", "^"),
    RESTART: Style("#009e73", "*"),
}
REPLACED = Style("#7f7f7f", "o")
"""Of ways that put other text in, which a line joins."""
FITTED = (Style("#999933", "d"), Style("#661100", "H"))
"""Of fitted slots, the fewest first."""
TRAINED = Style("#882255", "p")
FARTHEST = 1.7
"""Share of a restart's cost at which ways stand that cost more."""
FREE = 0.03
"""Share below which a cost counts as none: the seconds of an edit."""


class Frontier:
    """A column for each measure and a row for each cost, as a share of a restart's; ways that cost nothing stand side
    by side."""

    file = "frontier"
    caption = (
        "What each way leaves and breaks against what it costs, as a share of a restart's: tokens that the model reads "
        "again, FLOPs of its passes (what is fitted between them is not counted), seconds on this machine; 95 % "
        "intervals over conversations. Joined: other text in the message's place, with more and more slots read again. "
        "Ways that cost nothing stand side by side at zero; ways that cost more than is shown, at the right edge, "
        "with their cost above."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        if "cost" not in findings:
            return None
        shown: list[Shown] = []
        with styled():
            figure, grid = plt.subplots(len(COSTS), len(PANELS), figsize=(12.5, 11.0), squeeze=False)
            for row, (cost, said) in zip(grid, COSTS.items(), strict=True):
                costs = {str(one.keys["way"]): one.value.mean for one in findings.where(cost)}
                costs = {way: share for way, share in costs.items() if np.isfinite(share)}
                shown += self._row(row, findings, labels, costs, said)
            handles, names = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
            say(figure, shown, labels, title, "a scale for each column")
            figure.set_layout_engine("constrained")
        return figure

    def _row(
        self, row: "Sequence[Axes]", findings: Findings, labels: Labels, costs: Mapping[str, float], said: str
    ) -> list[Shown]:
        """One cost's panels."""
        free = [way for way, cost in costs.items() if cost < FREE]
        places, far = dict(costs), [way for way, cost in costs.items() if cost > FARTHEST]
        places |= {way: FARTHEST + 0.12 * place for place, way in enumerate(far)}
        places |= {way: -0.05 * place for place, way in enumerate(reversed(free))}
        fitted = dict(zip((way for way in costs if way.startswith(MATCHED)), FITTED, strict=False))
        looks = {way: fitted.get(way) or _look(way) for way in places}
        shown: list[Shown] = []
        for axis, (measure, label) in zip(row, PANELS.items(), strict=True):
            known: list[Finding] = [
                one for one in findings.where(measure) if one.keys["way"] in places and not one.value.unknown
            ]
            points = {str(one.keys["way"]): (places[str(one.keys["way"])], one.value) for one in known}
            joined = sorted(spot for way, spot in points.items() if way.startswith(OTHER))
            axis.plot([x for x, _ in joined], [value.mean for _, value in joined], color=REPLACED.colour, lw=1.1)
            for way, (across, value) in points.items():
                style = looks[way]
                low, high = value.ends
                axis.errorbar(
                    across,
                    value.mean,
                    yerr=np.clip([[value.mean - low], [high - value.mean]], 0, None),
                    fmt=style.marker,
                    color=style.colour,
                    mfc={ALL: "white"}.get(way, "none" if style in FITTED else style.colour),
                    ms=9 if style.marker in "*^" else 6,
                    elinewidth=0.8,
                    label=labels("way", way),
                )
                if way.startswith(OTHER):
                    text = way.removeprefix(OTHER).strip() or "0"
                    axis.annotate(text, (across, value.mean), (4, 6), textcoords="offset points", fontsize=7)
            for place, way in enumerate(far):
                axis.annotate(
                    f"→ {costs[way]:.2g}", (places[way], 1.0 + 0.05 * place), xycoords=("data", "axes fraction"),
                    ha="center", fontsize=7, color=looks[way].colour,
                )  # fmt: skip
            axis.axvline(FREE, color="0.85", lw=0.8, zorder=0)
            axis.axhline(0.0, color="0.85", lw=0.8, zorder=0)
            axis.set(xlabel=f"{said} (share of a restart's)", ylabel=label)
            axis.set_xticks([0.0, 0.5, 1.0])
            shown.append((axis, known))
        return shown


def _look(way: str) -> Style:
    if way.startswith(ERASED):
        return TRAINED
    return STYLES.get(way, REPLACED)
