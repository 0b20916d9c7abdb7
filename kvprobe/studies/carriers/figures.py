"""The figures of the carriers study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from kvprobe.report.plots import save, styled
from kvprobe.studies.carriers.analyse import BOTH
from kvprobe.studies.carriers.collect import DIRECTIONS
from kvprobe.studies.carriers.groups import GROUPS, KINDS, PARTS
from kvprobe.wording import ends

COLOURS = {"K": "#0072b2", "V": "#d55e00", "KV": "#000000"}
ROWS = (("all after", "K"), ("all after", "V"), ("all after", "KV"), *((kind, "KV") for kind in KINDS))
"""What the map over layers shows."""


def draw_all(metrics: Mapping[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    save(shares(metrics), folder / "shares")
    save(layers(metrics), folder / "layers")
    if "groups" in metrics["codes"]:
        save(codes(metrics["codes"]), folder / "codes")


def row_name(group: str, part: str) -> str:
    return group if part == "KV" else f"{group}, {part} alone"


def shares_by_layer(metrics: Mapping[str, Any], direction: str) -> list[list[float | None]]:
    """`ROWS` × bands."""
    told = {
        (each["group"], each["part"], each["band"]): each["share"]
        for each in metrics["layers"]
        if each["direction"] == direction
    }

    def value(share: Mapping[str, float] | None) -> float | None:
        return None if share is None else share["mean"]

    return [[value(told[group, part, band]) for band in metrics["bands"]] for group, part in ROWS]


def shares(metrics: Mapping[str, Any]) -> Any:
    """Share of the effect in each group of slots, K and V apart, both directions side by side, with 95 % intervals."""
    import matplotlib.pyplot as plt

    with styled():
        figure, panels = plt.subplots(1, 2, figsize=(8.6, 4.2), sharey=True, sharex=True)
        for axis, direction in zip(panels, DIRECTIONS, strict=True):
            for offset, part in zip((-0.22, 0, 0.22), PARTS, strict=True):
                told = {
                    each["group"]: each["share"]
                    for each in metrics["shares"]
                    if (each["question"], each["direction"], each["metric"], each["part"])
                    == (BOTH, direction, "kl", part)
                }
                known = [(place, told[group]) for place, group in enumerate(GROUPS) if told[group] is not None]
                for place, each in known:
                    axis.plot(ends(each), [place + offset] * 2, color=COLOURS[part], lw=1.1)
                axis.plot(
                    [each["mean"] for _, each in known],
                    [place + offset for place, _ in known],
                    "o",
                    ms=4,
                    color=COLOURS[part],
                    label={"KV": "K and V"}.get(part, part),
                )
            for line in (0, 1):
                axis.axvline(line, color="0.6", ls="--", lw=0.8, zorder=0)
            axis.axhline(len(KINDS) - 0.5, color="0.85", lw=0.8, zorder=0)
            axis.set_title(direction)
            axis.set_xlabel("share of the KL between the two caches")
        panels[0].set_yticks(range(len(GROUPS)), GROUPS)
        panels[0].invert_yaxis()
        panels[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.tight_layout()
    return figure


def layers(metrics: Mapping[str, Any]) -> Any:
    """Share of the effect by kind of slot and band of layers."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    tables = [np.array(shares_by_layer(metrics, direction), dtype=float) for direction in DIRECTIONS]
    finite = np.concatenate([table[np.isfinite(table)] for table in tables])
    bound = max(float(np.abs(finite).max()) if finite.size else 0.0, 0.05)
    width = 2.2 + 0.62 * len(metrics["bands"])
    with styled():
        figure, panels = plt.subplots(
            1, 2, figsize=(2 * width + 1, 3.7), sharey=True, layout="constrained", width_ratios=(1, 1.12)
        )
        for axis, table, direction in zip(panels, tables, DIRECTIONS, strict=True):
            sns.heatmap(
                table,
                ax=axis,
                vmin=-bound,
                vmax=bound,
                cmap="RdBu",
                # Rounded first, and zero added, so that no cell reads −0.00.
                annot=np.round(table, 2) + 0.0,
                fmt=".2f",
                annot_kws={"fontsize": 7},
                linewidths=0.5,
                xticklabels=metrics["bands"],
                yticklabels=[row_name(*row) for row in ROWS],
                cbar=axis is panels[-1],
                cbar_kws={"label": "share of the KL"},
            )
            axis.axhline(3, color="0.2", lw=1)
            axis.tick_params(length=0, axis="both")
            axis.tick_params(axis="y", rotation=0)
            axis.tick_params(axis="x", rotation=0)
            axis.set_xlabel("layers")
            axis.set_title(direction)
    return figure


def codes(told: Mapping[str, Any]) -> Any:
    """What swapping for slots that saw another code moves, over the whole swing with everything in view."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axis = plt.subplots(figsize=(6.2, 3.2))
        for place, each in enumerate(told["groups"]):
            found = each["effect"]
            axis.plot(ends(found), [place] * 2, color="#0072b2", lw=1.4)
            axis.plot(found["mean"], place, "o", ms=5, color="#0072b2")
        axis.axvline(0, color="0.6", ls="--", lw=0.8, zorder=0)
        axis.set_yticks(range(len(told["groups"])), [each["group"] for each in told["groups"]])
        axis.invert_yaxis()
        axis.set_xlabel("moved towards the code that the swapped slots have seen (logits)")
        axis.set_title(f"with the turn in view, the codes differ by {told['in_view']['mean']:.1f} logits", fontsize=9)
        figure.tight_layout()
    return figure
