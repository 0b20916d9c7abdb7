"""The figure that shows the answer: what is read of each place, beside what the model loses with it."""

from collections.abc import Sequence
from typing import Any

from kvprobe.experiments.study import Labels
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.report.findings import Findings
from kvprobe.report.plots.style import styled
from kvprobe.stats import Estimate
from kvprobe.studies.use.check import INTACT, SAME
from kvprobe.studies.use.effects import BOTH, FULL, IN_VIEW, SITES
from kvprobe.studies.use.fit import INLP, LEACE, RANDOM

COLOURS = {LEACE: "#d55e00", RANDOM: "#009e73", FULL: "#7f7f7f", INTACT: "#0072b2", INLP: "#cc79a7"}


class ReadAndUsed:
    """Side by side for each place: what a probe reads before and after erasure, and what the model loses by it."""

    file = "read_and_used"
    caption = (
        "Left: digits that a probe of the other half's conversations reads in V, mean over layers; dashed: chance. "
        "Right: what the model loses when K and V of all layers are erased there; dashed: the margin with everything "
        "in view. 95 % intervals over conversations."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any | None:
        import matplotlib.pyplot as plt

        if "lost" not in findings:
            return None
        with styled():
            figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.3), sharey=True)
            for shift, state in zip((-0.2, 0.0, 0.2), (INTACT, LEACE, RANDOM), strict=True):
                keys = {"part": "V", "probe": SAME, "state": state}
                values = [findings.get("read", place=place, **keys) for _, place in SITES]
                _points(left, values, shift, COLOURS[state], labels("state", state))
            for shift, edit in zip((-0.2, 0.0, 0.2), (LEACE, RANDOM, FULL), strict=True):
                keys = {"band": EVERY_LAYER, "part": BOTH, "edit": edit}
                values = [findings.get("lost", site=site, **keys) for site in SITES.values()]
                _points(right, values, shift, COLOURS[edit], labels("edit", edit))
            for axis, value in ((left, findings.get("chance")), (right, findings.get("margin", view=IN_VIEW))):
                if value is not None:
                    axis.axvline(value.mean, color="0.35", ls="--", lw=0.9)
            left.set_xlabel("digits that the probe reads (share)")
            left.set_xlim(0, 1)
            right.set_xlabel("margin of the true code lost (nats)")
            left.set_yticks(range(len(SITES)), [labels("site", site).replace(" (", "\n(") for site in SITES.values()])
            left.set_ylim(len(SITES) - 0.5, -0.5)
            named = {
                label: handle
                for axis in (left, right)
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
            }
            figure.suptitle(title, fontsize=10)
            figure.legend(named.values(), named.keys(), loc="lower center", ncols=4, frameon=False)
            figure.tight_layout(rect=(0, 0.08, 1, 1))
        return figure


def _points(axis: Any, values: Sequence[Estimate | None], shift: float, colour: str, label: str) -> None:
    """A point for each place, with its interval, this far below the place's line."""
    known = [(row + shift, value) for row, value in enumerate(values) if value is not None]
    for row, value in known:
        axis.plot(value.ends, [row, row], color=colour, lw=1.3)
    axis.plot([value.mean for _, value in known], [row for row, _ in known], "o", ms=4.5, color=colour, label=label)
