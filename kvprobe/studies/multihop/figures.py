"""The figures of the multihop study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.probing.splits import SPLITS
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import ARM_COLOURS, save, styled
from kvprobe.studies.multihop.analyse import TRANSFERRED
from kvprobe.studies.multihop.arms import ARMS, DISTANCES, Arm, lowest_layer
from kvprobe.studies.multihop.collect import SHOWN, USE_ARMS, place
from kvprobe.wording import estimate_of

COLOURS = {"open": "#0072b2", "hop-forced": "#d55e00", "skip": "#cc79a7"}
ARM_NAMES = {
    "open": "open: all earlier summaries in view",
    "hop-forced": "hop-forced: only the last summary in view",
    "skip": "skip: only the first summary in view",
}
FAMILY_NAMES = {
    "k_pre": "K before rotary embedding",
    "k": "K (keys)",
    "v": "V (values)",
    "resid_post": "residual stream",
}
SPLIT_NAMES = {"random": "random", "leave-context-out": "leave-context-out", "paired": "paired (centred in session)"}


def draw_all(probes: Any, metrics: Mapping[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    save(by_distance(metrics), folder / "by_distance")
    for family in probes["family"].unique():
        save(by_layer(probes, family), folder / f"by_layer_{family}")
    save(transfer(metrics), folder / "transfer")
    save(use(metrics["use"]), folder / "use")


def by_distance(metrics: Mapping[str, Any]) -> Any:
    """Accuracy per digit by distance, one line per arm, and the floors of all arms; bands are 95 % intervals."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axes = plt.subplots(1, len(SPLITS), figsize=(10.5, 3.5), sharex=True)
        for axis, split in zip(axes, SPLITS, strict=True):
            for arm in ARMS:
                line(axis, metrics["floor"][split][arm], ARM_COLOURS["restart"], "restart floors", 0.07)
            for arm in ARMS:
                line(axis, metrics["accuracy"][split][arm], COLOURS[arm], ARM_NAMES[arm], 0.18, marker="o")
            axis.axhline(metrics["chance"], color="0.35", ls="--", lw=0.9, label="chance")
            axis.set_title(SPLIT_NAMES[split])
            axis.set_xlabel("turns after the hidden one")
            axis.set_xticks(list(DISTANCES))
            axis.set_ylim(0, None)
        axes[0].set_ylabel("accuracy per digit")
        handles, labels = axes[0].get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        figure.legend(once.values(), once.keys(), loc="lower center", ncols=3, frameon=False)
        figure.tight_layout(rect=(0, 0.13, 1, 1))
    return figure


def line(axis: Any, values: Any, colour: str, label: str, alpha: float, **style: Any) -> None:
    """A line over distances with its band."""
    found = [estimate_of(each) for each in values]
    mean, low, high = (np.array([getattr(each, end) for each in found]) for end in ("mean", "low", "high"))
    axis.fill_between(DISTANCES, low, high, color=colour, alpha=alpha, lw=0)
    axis.plot(DISTANCES, mean, color=colour, label=label, markersize=4, **style)


def by_layer(probes: Any, family: str) -> Any:
    """Accuracy per digit by layer and distance in each arm, slots averaged, paired; the line is the light cone's
    edge."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    tables = {arm: layer_table(probes, family, arm) for arm in ARMS}
    top = max(0.2, *(float(np.nanmax(table.to_numpy())) for table in tables.values()))
    with styled():
        figure, axes = plt.subplots(1, len(ARMS), figsize=(10.5, 4.6), sharey=True, layout="constrained")
        for axis, arm in zip(axes, ARMS, strict=True):
            last = arm == ARMS[-1]
            sns.heatmap(
                tables[arm],
                ax=axis,
                vmin=0.1,
                vmax=top,
                cmap="rocket_r",
                cbar=last,
                cbar_kws={"label": "accuracy per digit (pale = chance)"},
            )
            edge = [lowest_layer(arm, distance) - (family == "resid_post") for distance in DISTANCES]
            axis.stairs(edge, range(len(DISTANCES) + 1), color=ARM_COLOURS["restart"], lw=1.5, baseline=None)
            axis.invert_yaxis()
            axis.set_title(ARM_NAMES[arm])
            axis.set_xlabel("turns after the hidden one")
            axis.set_ylabel(f"layer of {FAMILY_NAMES[family]}" if arm == ARMS[0] else "")
            axis.tick_params(rotation=0)
    return figure


def layer_table(probes: Any, family: str, arm: Arm, split: str = "paired") -> pd.DataFrame:
    """Layers by distances: accuracy per digit from averaged slots, after masking."""
    chosen = {"condition": "retained", "split": split, "family": family, "read": "mean"}
    own = probes[(probes[list(chosen)] == pd.Series(chosen)).all(axis=1)]
    own = own[own["arm"].isin([place(arm, 0)[0], arm])]
    return own.pivot(index="layer", columns="distance", values="accuracy")


def layer_maps(probes: Any, metrics: Mapping[str, Any]) -> list[HeatMap]:
    """Layer by distance for each arm and family, chance taken off."""
    return [
        map_of(
            layer_table(probes, family, arm) - metrics["chance"],
            f"{FAMILY_NAMES[family]}, {ARM_NAMES[arm]}: accuracy per digit above chance ({metrics['chance']:.0%}), "
            "slots averaged, paired split.",
            "of the digits above chance",
        )
        for family in probes["family"].unique()
        for arm in ARMS
    ]


def transfer(metrics: Mapping[str, Any]) -> Any:
    """Accuracy of the probe trained at each distance, tested at each: arms across, splits down."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    with styled():
        figure, grid = plt.subplots(
            len(TRANSFERRED), len(ARMS), figsize=(10.5, 6.4), sharex=True, sharey=True, layout="constrained"
        )
        for axes, split in zip(grid, TRANSFERRED, strict=True):
            tables = {arm: accuracies(metrics["transfer"][split][arm]) for arm in ARMS}
            top = max(0.2, *(float(table.max()) for table in tables.values()))
            for axis, arm in zip(axes, ARMS, strict=True):
                sns.heatmap(
                    100 * tables[arm],
                    ax=axis,
                    vmin=100 * metrics["chance"],
                    vmax=100 * top,
                    cmap="rocket_r",
                    annot=True,
                    fmt=".0f",
                    annot_kws={"size": 7},
                    cbar=arm == ARMS[-1],
                    cbar_kws={"label": f"digits right, %, {split}"},
                )
                axis.set_title(arm if split == TRANSFERRED[0] else "")
                axis.set_xlabel("tested so many turns after" if split == TRANSFERRED[-1] else "")
                axis.set_ylabel("trained so many turns after" if arm == ARMS[0] else "")
                axis.tick_params(rotation=0)
    return figure


def accuracies(transfer: Mapping[str, Any]) -> np.ndarray:
    """Distances trained at by distances tested at."""
    return np.array([[each["mean"] for each in row] for row in transfer["accuracy"]])


def use(measured: Mapping[str, Any]) -> Any:
    """What masking instead of restarting gives the true code, per arm; and how much of the code is said right, per
    cache."""
    import matplotlib.pyplot as plt

    panels = {
        "delta_margin": (ARMS, "margin of the true code over others,\nmasked less restarted (nats)", 0.0),
        "token_accuracy": (USE_ARMS[1:], f"share of code tokens right (with {SHOWN}: {{}})", 0.1),
    }
    with styled():
        figure, axes = plt.subplots(1, len(panels), figsize=(10.5, 2.8))
        for axis, (key, (arms, label, chance)) in zip(axes, panels.items(), strict=True):
            for number, arm in enumerate(arms):
                value = estimate_of(measured[arm][key])
                error = np.array([[value.mean - value.low], [value.high - value.mean]])
                colour = COLOURS.get(arm, ARM_COLOURS["restart"])
                axis.errorbar([value.mean], [number], xerr=error, fmt="o", color=colour, capsize=3, markersize=6)
            axis.axvline(chance, color="0.35", ls="--", lw=0.9)
            axis.set_yticks(range(len(arms)), arms)
            axis.set_ylim(len(arms) - 0.5, -0.5)
            axis.locator_params(axis="x", nbins=5)
            axis.set_xlabel(label.format(f"{measured[SHOWN]['token_accuracy']['mean']:.2f}"))
        figure.tight_layout()
    return figure
