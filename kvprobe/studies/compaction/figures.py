"""The figures of the compaction study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import ARM_COLOURS, save, styled
from kvprobe.studies.compaction.analyse import OUTCOMES
from kvprobe.studies.compaction.arms import ARMS, CONTRASTS
from kvprobe.wording import estimate_of, whiskers

COLOURS = {"retained": ARM_COLOURS["masked"], "recomputed": ARM_COLOURS["restart"]}
SHOWN = ("kl", "agreement", "right_summary", "margin", "paired", "prefix_hidden")
EFFECT_NAMES = {
    "provenance": "provenance: retained − recomputed",
    "law": "positions: gapped − contiguous",
    "delimiters": "delimiters: kept − dropped",
}


def draw_all(metrics: dict[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    save(by_arm(metrics), folder / "arms")
    save(effects(metrics), folder / "effects")
    save(dangling(metrics["dangling"]), folder / "dangling")


def by_arm(metrics: dict[str, Any]) -> Any:
    """Each outcome for each arm; dots with 95 % intervals, and where the full context or chance stands."""
    import matplotlib.pyplot as plt

    lines = {
        "kl": (metrics["calibration"]["kl_masked"]["mean"], "irrelevant block, masked"),
        "margin": (0.0, "no knowledge of the code"),
        "paired": (metrics["chance"], "chance"),
        "right_summary": (metrics["full"]["right_summary"]["mean"], "full context"),
    }
    with styled():
        figure, grid = plt.subplots(2, 3, figsize=(11, 5.4), sharey=True)
        for axis, outcome in zip(grid.flat, SHOWN, strict=True):
            for place, arm in enumerate(ARMS):
                value = metrics["arms"][arm.name][outcome]
                error = whiskers(value)
                axis.errorbar(
                    [value["mean"]],
                    [place],
                    xerr=error,
                    fmt="o" if arm.delimiters == "dropped" else "s",
                    mfc=COLOURS[arm.provenance] if arm.mode == "gapped" else "white",
                    color=COLOURS[arm.provenance],
                    capsize=2.5,
                    markersize=5.5,
                )
            if outcome in lines:
                axis.axvline(lines[outcome][0], color="0.35", ls="--", lw=0.9)
                axis.set_title(f"dashed: {lines[outcome][1]}", fontsize=8, color="0.35")
            axis.set_xlabel(OUTCOMES[outcome])
            axis.set_yticks(range(len(ARMS)), [arm.name for arm in ARMS])
            axis.set_ylim(len(ARMS) - 0.5, -0.5)
        figure.tight_layout()
    return figure


def effects(metrics: dict[str, Any]) -> Any:
    """Main effects and interactions on each outcome, with their intervals; filled where zero is outside."""
    import matplotlib.pyplot as plt

    names = [" × ".join(factors) for factors in CONTRASTS]
    labels = [EFFECT_NAMES.get(name, name) for name in names]
    with styled():
        figure, grid = plt.subplots(2, 3, figsize=(11, 5), sharey=True)
        for axis, outcome in zip(grid.flat, SHOWN, strict=True):
            for place, name in enumerate(names):
                value = metrics["effects"][outcome][name]
                apart = estimate_of(value).differs()
                error = whiskers(value)
                axis.errorbar(
                    [value["mean"]],
                    [place],
                    xerr=error,
                    fmt="o",
                    color="#0072b2",
                    mfc="#0072b2" if apart else "white",
                    capsize=2.5,
                    markersize=5.5,
                )
            axis.axvline(0, color="0.35", lw=0.9)
            axis.axhline(2.5, color="0.8", lw=0.8)
            axis.set_xlabel(OUTCOMES[outcome])
            axis.set_yticks(range(len(names)), labels)
            axis.set_ylim(len(names) - 0.5, -0.5)
        figure.tight_layout()
    return figure


def dangling(measured: dict[str, Any]) -> Any:
    """Attention spent on the hidden turns while they are in view, by layer and head; and where it goes instead."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    heads = np.array(measured["by_head"])
    layers = np.arange(len(heads))
    colours = ("#7f7f7f", "#cc79a7", "#e69f00", "#0072b2")
    with styled():
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), width_ratios=(1, 1.4))
        sns.heatmap(heads, ax=left, cmap="rocket_r", vmin=0, cbar_kws={"label": "share of attention"})
        left.invert_yaxis()
        left.set_xlabel("head")
        left.set_ylabel("layer")
        left.tick_params(axis="y", rotation=0)
        left.set_title("T3's attention on the hidden turns, all in view")
        right.plot(layers, measured["by_layer"], color="black", lw=2, label="spent on the hidden turns")
        for (name, values), colour in zip(measured["went_by_layer"].items(), colours, strict=True):
            right.plot(layers, values, color=colour, label=f"after masking: {name}")
        right.axhline(0, color="0.35", lw=0.9)
        right.set_xlabel("layer")
        right.set_ylabel("share of attention (change)")
        right.set_title("and where it goes when they are masked")
        right.legend(frameon=False, fontsize=8)
        figure.tight_layout()
    return figure


def dangling_maps(measured: Mapping[str, Any]) -> list[HeatMap]:
    """Head by layer for what is spent on the hidden turns, and layer by place for where it goes."""
    heads = pd.DataFrame(measured["by_head"]).rename_axis(index="layer", columns="head")
    went = pd.DataFrame(measured["went_by_layer"]).rename_axis(index="layer", columns="to")
    return [
        map_of(
            heads,
            "T3's attention on the hidden turns while they are in view, mean over conversations and queries.",
            "of all attention",
        ),
        map_of(
            went,
            "Change of T3's attention when the hidden turns are masked, mean over conversations, heads and queries; a "
            "layer's sum is what it spent on them. The table above has the intervals of the means over layers.",
            "of all attention",
        ),
    ]
