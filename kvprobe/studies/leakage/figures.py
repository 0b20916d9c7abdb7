"""The figures of the leakage study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import ARM_COLOURS, save, styled
from kvprobe.studies.leakage.collect import FAMILIES, USE_ARMS
from kvprobe.wording import estimate_of

FAMILY_NAMES = {"k": "K (keys)", "v": "V (values)", "resid_post": "residual stream"}
ARM_NAMES = {
    "hidden": "T2 itself, after the secret",
    "direct": "direct: summary 2, saw T2",
    "masked": "masked: T3, cannot see T2",
    "restart": "restart: T3 recomputed (floor)",
    "before": "before: summary 1",
    "direct less restart": "direct, less its restart",
    "masked less restart": "masked, less its restart",
}
SEGMENTS = {
    "before": "summary 1",
    "hidden": "T2 after it",
    "direct": "summary 2",
    "masked": "T3 masked",
    "restart": "T3 restart",
}
"""What each arm reads, in the order of the conversation."""


def draw_all(probes: Any, metrics: dict[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    for read in probes["read"].unique():
        figure = accuracy_by_layer(probes[probes["read"] == read], metrics["chance"])
        save(figure, folder / f"accuracy_by_layer_{read}")
    save(heatmap(probes, metrics), folder / "layer_by_segment")
    save(use(metrics["use"]), folder / "use")


def accuracy_by_layer(probes: Any, chance: float, families: Sequence[str] = FAMILIES) -> Any:
    """Accuracy per label by layer, one line per arm, families down, splits across; bands are 95 % intervals."""
    import matplotlib.pyplot as plt

    splits = list(probes["split"].unique())
    with styled():
        figure, grid = plt.subplots(
            len(families),
            len(splits),
            figsize=(3.1 * len(splits) + 1.2, 2.3 * len(families) + 0.9),
            sharex=True,
            sharey="col",
            squeeze=False,
        )
        for axes, family in zip(grid, families, strict=True):
            for axis, split in zip(axes, splits, strict=True):
                panel = probes[(probes["family"] == family) & (probes["split"] == split)]
                for arm, name in ARM_NAMES.items():
                    line = panel[panel["arm"] == arm].sort_values("layer")
                    if not len(line):
                        continue
                    axis.fill_between(
                        line["layer"], line["low"], line["high"], color=ARM_COLOURS[arm], alpha=0.18, lw=0
                    )
                    axis.plot(line["layer"], line["accuracy"], color=ARM_COLOURS[arm], label=name)
                axis.axhline(chance, color="0.35", ls="--", lw=0.9, label="chance")
        for axis in grid[0]:
            axis.set_ylim(0, None)
        for axis, split in zip(grid[0], splits, strict=True):
            axis.set_title(split if split != "paired" else "paired (centred in context)")
        for axes, family in zip(grid, families, strict=True):
            axes[0].set_ylabel(f"{FAMILY_NAMES[family]}\naccuracy per label")
        for axis in grid[-1]:
            axis.set_xlabel("layer")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.65 / figure.get_figheight(), 1, 1))
    return figure


def heatmap(probes: Any, metrics: dict[str, Any]) -> Any:
    """Accuracy per label by layer and segment, on the headline split."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    tables = {family: layer_table(probes, metrics, family) for family in FAMILIES}
    top = max(0.2, *(float(table.to_numpy().max()) for table in tables.values()))
    with styled():
        figure, axes = plt.subplots(1, len(FAMILIES), figsize=(10.5, 5.6), sharey=True)
        for axis, family in zip(axes, FAMILIES, strict=True):
            sns.heatmap(
                tables[family],
                ax=axis,
                vmin=metrics["chance"],
                vmax=top,
                cmap="rocket_r",
                cbar=family == FAMILIES[-1],
                cbar_kws={"label": f"accuracy per label (pale = chance, {metrics['chance']:.0%})"},
            )
            axis.invert_yaxis()
            axis.set_title(FAMILY_NAMES[family])
            axis.set_xlabel("")
            axis.set_ylabel("layer" if family == FAMILIES[0] else "")
            axis.tick_params(axis="x", rotation=35)
            axis.tick_params(axis="y", rotation=0)
            plt.setp(axis.get_xticklabels(), ha="right")
        figure.tight_layout()
    return figure


def layer_table(probes: Any, metrics: Mapping[str, Any], family: str) -> pd.DataFrame:
    """Layers by segments: accuracy per label from averaged slots, on the headline split."""
    chosen = {"split": metrics["headline_split"], "family": family, "read": "mean"}
    own = probes[(probes[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    table = own.pivot(index="layer", columns="arm", values="accuracy")[list(SEGMENTS)]
    return table.rename(columns=SEGMENTS).rename_axis(columns="segment")


def layer_maps(probes: Any, metrics: Mapping[str, Any]) -> list[HeatMap]:
    """Layer by segment for K, V and the residual stream, chance taken off."""
    return [
        map_of(
            layer_table(probes, metrics, family) - metrics["chance"],
            f"{FAMILY_NAMES[family]}: accuracy per label above chance ({metrics['chance']:.0%}), slots averaged, "
            f"{metrics['headline_split']} split. T3 restart cannot know the secret: it shows what luck gives.",
            "of the labels above chance",
        )
        for family in FAMILIES
    ]


def use(measured: dict[str, Any]) -> Any:
    """How likely the true secret is to the model, and how far its answer is from the full context's, per arm."""
    import matplotlib.pyplot as plt

    panels = {
        "margin": "margin of the true secret over others (nats)",
        "token_accuracy": "share of its tokens the model gets right",
        "kl_from_full": "KL from full context, first token (nats)",
    }
    colours = [ARM_COLOURS[{"full": "direct", "retained": "masked", "restart": "restart"}[arm]] for arm in USE_ARMS]
    with styled():
        figure, axes = plt.subplots(1, len(panels), figsize=(10.5, 2.4))
        for axis, (key, label) in zip(axes, panels.items(), strict=True):
            for place, (arm, colour) in enumerate(zip(USE_ARMS, colours, strict=True)):
                value = estimate_of(measured[arm][key])
                error = np.array([[value.mean - value.low], [value.high - value.mean]])
                axis.errorbar([value.mean], [place], xerr=error, fmt="o", color=colour, capsize=3, markersize=6)
            axis.set_yticks(range(len(USE_ARMS)), USE_ARMS)
            axis.set_ylim(len(USE_ARMS) - 0.5, -0.5)
            axis.set_xlabel(label)
        figure.tight_layout()
    return figure
