"""What is left against what it costs: a point for each way."""

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
    from matplotlib.figure import Figure

PANELS = {
    "bits": "read by one who knows the\nconversation (share of the bits)",
    "used": "used by the model (share of\nthe effect in full view)",
    "kl": "KL of other replies from the\nsame text read anew (nats)",
}
STYLES = {
    NOTHING: Style("#000000", "D"),
    ERRATUM: Style("#cc79a7", "P"),
    STEERED: Style("#e69f00", "X"),
    ZERO: Style("#d55e00", "v"),
    MASK: Style("#0072b2", "s"),
    EVICT: Style("#56b4e9", "s"),
    CLOSED: Style("#332288", "o"),
    PLACED: Style("#009e73", "^"),
    RESTART: Style("#009e73", "*"),
}
REPLACED = Style("#7f7f7f", "o")
"""Of ways that put other text in, which a line joins."""
FITTED = Style("#f0e442", "d")
TRAINED = Style("#882255", "p")
FARTHEST = 1.5
"""Share of a restart's tokens at which ways stand that cost more."""


class Frontier:
    """A panel for each measure. Along the axis: tokens read again, as a share of those of a restart; ways that read
    none stand side by side."""

    file = "frontier"
    caption = (
        "What each way leaves and breaks against the tokens that the model reads again, as a share of a restart's; "
        "95 % intervals over conversations. Joined: other text in the message's place, with more and more slots read "
        "again. Ways that read nothing again stand side by side at zero; ways that cost more than is shown, at the "
        "right edge."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> "Figure | None":
        import matplotlib.pyplot as plt

        if "cost" not in findings:
            return None
        costs: dict[str, float] = {str(one.keys["way"]): one.value.mean for one in findings.where("cost")}
        costs = {way: cost for way, cost in costs.items() if np.isfinite(cost)}
        free = [way for way, cost in costs.items() if cost == 0]
        places = {way: min(cost, FARTHEST) for way, cost in costs.items()}
        places |= {way: -0.05 * place for place, way in enumerate(reversed(free))}
        shown: list[Shown] = []
        with styled():
            figure, grid = plt.subplots(1, len(PANELS), figsize=(12.5, 4.4), squeeze=False)
            looks = {way: _look(way) for way in places}
            for axis, (measure, label) in zip(grid[0], PANELS.items(), strict=True):
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
                        mfc="white" if way == ALL else style.colour,
                        ms=9 if style.marker == "*" else 6,
                        elinewidth=0.8,
                        label=labels("way", way),
                    )
                    if way.startswith(OTHER):
                        text = way.removeprefix(OTHER).strip() or "0"
                        axis.annotate(text, (across, value.mean), (4, 6), textcoords="offset points", fontsize=7)
                    if costs[way] > FARTHEST:
                        text = f"→ {costs[way]:.0f}"
                        axis.annotate(text, (across, value.mean), (-8, 6), textcoords="offset points", fontsize=7)
                axis.axvline(0.03, color="0.85", lw=0.8, zorder=0)
                axis.axhline(0.0, color="0.85", lw=0.8, zorder=0)
                axis.set(xlabel="tokens read again (share of a restart's)", ylabel=label)
                axis.set_xticks([0.0, 0.5, 1.0])
                shown.append((axis, known))
            handles, names = grid[0][0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False)
            say(figure, shown, labels, title, "a scale for each panel")
            figure.set_layout_engine("constrained")
        return figure


def _look(way: str) -> Style:
    if way.startswith(ERASED):
        return TRAINED
    return STYLES.get(way, FITTED if way.startswith(MATCHED) else REPLACED)
