"""The two figures of the study that no declaration of the framework draws: the index by layer, and by head."""

from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.study import Labels
from kvprobe.report.findings import Findings
from kvprobe.report.plots.lines import Style
from kvprobe.report.plots.style import heat, styled
from kvprobe.studies.filter_poison.conclude import KINDS
from kvprobe.studies.filter_poison.config import Config
from kvprobe.studies.filter_poison.halves import FILTER, POISON

BOUND = 1.0
"""Indices below minus this are drawn at the edge: an MLP whose reaction was protective may leave several times the
damage."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
MARKERS = "os^DPx*+"
STYLES = {family: Style(*look) for family, *look in zip(Config().rates, COLOURS, MARKERS, strict=False)}
VERDICTS = {"neutral": "0.75", "unknown": "0.75", "mixed": "#e69f00", FILTER: "#d55e00", POISON: "#0072b2"}
"""Blue above zero and red below it, as in the maps."""


class Strips:
    """The causal index of every attention block and MLP in each family, and of every head as the mean of families."""

    file = "strips"
    caption = (
        "The share of the damage that goes away when one output is restored, with 95 % intervals. Indices below −1 are "
        "drawn as triangles at the edge. Heads are coloured by verdict."
    )

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any:
        import matplotlib.pyplot as plt

        families = findings.values("pi", "family")
        offsets = np.linspace(-0.3, 0.3, len(families))
        with styled():
            figure, axes = plt.subplots(3, 1, figsize=(10.4, 8.4), sharex=True)
            for axis, kind in zip(axes, KINDS, strict=True):
                axis.axhline(0, color="0.4", lw=0.8)
                axis.set_ylabel(f"{KINDS[kind]}: π")
            for axis, kind in zip(axes, ("attn", "mlp"), strict=False):
                for number, (family, offset) in enumerate(zip(families, offsets, strict=True)):
                    points = findings.where("pi", kind=kind, family=family)
                    layers = np.array([point.keys["layer"] for point in points]) + offset
                    low, high = np.array([point.value.ends for point in points]).clip(-BOUND).T
                    look = STYLES.get(str(family), Style(COLOURS[number % 8], MARKERS[number % 8]))
                    axis.vlines(layers, low, high, color=look.colour, lw=0.7, alpha=0.6)
                    _dots(axis, layers, [point.value.mean for point in points], look, labels("family", family))
            for verdict, colour in VERDICTS.items():
                points = findings.where("called", kind="head", verdict=verdict)
                layers, means = [point.keys["layer"] for point in points], [point.value.mean for point in points]
                if points:
                    _dots(axes[2], layers, means, Style(colour), f"{verdict} ({len(points)})")
            for axis, name in ((axes[0], "damage"), (axes[2], "mean over damage")):
                axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), title=name)
            axes[-1].set_xlabel("layer")
            axes[0].set_title(title)
            figure.subplots_adjust(left=0.08, right=0.78, top=0.95, bottom=0.06, hspace=0.12)
        return figure


def _dots(axis: Any, layers: Any, values: Any, look: Style, label: str) -> None:
    """Points, those beyond the edge as triangles that point to where they are."""
    layers, values = np.asarray(layers, float), np.asarray(values, float)
    beyond = values < -BOUND
    axis.plot(layers[~beyond], values[~beyond], look.marker, color=look.colour, ms=3.4, label=label)
    axis.plot(layers[beyond], np.full(beyond.sum(), -BOUND), "v", color=look.colour, ms=4.5, clip_on=False)


class Heads:
    """The mean index of every head; a dot where it has a verdict."""

    file = "heads"
    caption = "Mean index of every head; a dot marks those that are called filter or poison."

    def draw(self, findings: Findings, labels: Labels, title: str) -> Any:
        import matplotlib.pyplot as plt

        known = {
            (int(each.keys["layer"]), int(each.keys["head"])): each for each in findings.where("called", kind="head")
        }
        table: Any = pd.Series({place: each.value.mean for place, each in known.items()}).unstack()
        bound = max(1e-3, float(table.abs().stack().quantile(0.99)))
        size = (max(7.0, 1.6 + 0.38 * len(table.columns)), 1.2 + 0.14 * len(table))
        with styled():
            figure, axis = plt.subplots(figsize=size, layout="constrained")
            heat(axis, table, bound, "π, mean of families")
            for (layer, head), each in known.items():
                if each.keys["verdict"] in (POISON, FILTER):
                    axis.plot(head + 0.5, layer + 0.5, ".", color="black", ms=4)
            axis.set(title=title, xlabel="head", ylabel="layer")
            axis.invert_yaxis()
            axis.tick_params(axis="y", rotation=0)
        return figure
