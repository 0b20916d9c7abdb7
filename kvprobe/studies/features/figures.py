"""The figures of the features study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from kvprobe.probing.intervals import LEVEL
from kvprobe.probing.splits import SPLITS
from kvprobe.report.plots import save, styled
from kvprobe.studies.features.analyse import KS
from kvprobe.studies.features.collect import PER_CODE, RESTARTED
from kvprobe.wording import estimate_of

ARM_NAMES = {
    "hidden": "T2 itself, after the code",
    "summary2": "summary 2, which saw T2",
    "T3": "T3, which cannot see T2",
    "restart T3": "T3 recomputed (floor)",
}
READER_NAMES = {"latents": "latents", "raw": "raw dimensions", "turned": "latents of a turned dictionary"}
READER_COLOURS = {"latents": "#d55e00", "raw": "#0072b2", "turned": "0.55"}
SET_NAMES = {
    "whole": "the whole activation",
    "all": "all latents",
    "differing": "latents that differ most",
    "random": "random latents",
}


def draw_all(differences: Any, curves: Any, quality: Any, metrics: Mapping[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    save(scatter(differences, metrics["places"]), folder / "differences")
    save(densities(quality, metrics), folder / "densities")
    save(exchange(metrics["exchange"]), folder / "exchange")
    for place in metrics["places"]:
        save(sparse(curves[curves["place"] == place], place, metrics["chance"]), folder / curves_file(place))


def curves_file(place: str) -> str:
    """Without the dot, which would look like a suffix."""
    return f"curves_{place.replace('.', '_')}"


def scatter(differences: Any, places: list[str]) -> Any:
    """Mean of each latent in the retained arm against the restart arm, same text at the same positions."""
    import matplotlib.pyplot as plt

    own = differences[differences["reader"] == "latents"]
    with styled():
        figure, grid = plt.subplots(
            len(RESTARTED), len(places), figsize=(3.3 * len(places), 6.2), squeeze=False, layout="constrained"
        )
        for axes, segment in zip(grid, RESTARTED, strict=True):
            for axis, place in zip(axes, places, strict=True):
                table = own[(own["segment"] == segment) & (own["place"] == place)]
                alive = table[(table["retained"] > 0) & (table["restart"] > 0)]
                differs = alive["p_family"] <= LEVEL
                for rows, colour, label in (
                    (alive[~differs], "0.7", "no difference found"),
                    (alive[differs], "#d55e00", f"differs (p ≤ {LEVEL:g}, all latents together)"),
                ):
                    axis.scatter(rows["restart"], rows["retained"], s=7, color=colour, label=label, lw=0)
                if len(alive):
                    ends = [alive[["restart", "retained"]].min().min(), alive[["restart", "retained"]].max().max()]
                    axis.plot(ends, ends, color="0.4", lw=0.8)
                axis.set(xscale="log", yscale="log", title=f"{place}: {ARM_NAMES[segment]}")
                axis.set_xlabel("mean activation, restart")
            axes[0].set_ylabel("mean activation, retained")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, markerscale=2)
    return figure


def densities(quality: Any, metrics: Mapping[str, Any]) -> Any:
    """How often latents are active."""
    import matplotlib.pyplot as plt

    places = metrics["places"]
    with styled():
        figure, axes = plt.subplots(1, len(places), figsize=(3.3 * len(places), 2.4), squeeze=False, sharey=True)
        for axis, place in zip(axes[0], places, strict=True):
            own = quality[(quality["place"] == place) & (quality["grid"] == "latents")]["density"].to_numpy(float)
            axis.hist(np.log10(own[own > 0]), bins=30, color="#0072b2")
            judged = metrics["quality"][place]
            axis.set_title(f"{place}: {judged['dead']} of {judged['width']} silent")
            axis.set_xlabel("share of tokens (log 10)")
        axes[0, 0].set_ylabel("latents")
        figure.tight_layout()
    return figure


def sparse(curves: Any, place: str, chance: float) -> Any:
    """Accuracy per digit against the number of latents or dimensions, splits down, segments across."""
    import matplotlib.pyplot as plt

    with styled():
        figure, grid = plt.subplots(
            len(SPLITS), len(PER_CODE), figsize=(9.6, 7.2), sharex=True, sharey="row", layout="constrained"
        )
        for axes, split in zip(grid, SPLITS, strict=True):
            for axis, arm in zip(axes, PER_CODE, strict=True):
                panel = curves[(curves["split"] == split) & (curves["arm"] == arm)]
                for reader, colour in READER_COLOURS.items():
                    line = panel[panel["reader"] == reader].sort_values("k")
                    axis.fill_between(line["k"], line["low"], line["high"], color=colour, alpha=0.18, lw=0)
                    axis.plot(line["k"], line["accuracy"], color=colour, marker="o", ms=3, label=READER_NAMES[reader])
                axis.axhline(chance, color="0.35", ls="--", lw=0.9)
                axis.set_xscale("log", base=4)
            axes[0].set_ylabel(f"{split}\naccuracy per digit")
        for axis, arm in zip(grid[0], PER_CODE, strict=True):
            axis.set_title(ARM_NAMES[arm])
        for axis in grid[-1]:
            axis.set_xlabel("latents or dimensions (the last is all)")
            axis.set_xticks(KS, [str(k) for k in KS])
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(place)
    return figure


def exchange(found: Mapping[str, Any]) -> Any:
    """The share of the KL between retained and restart answers that goes away with each set of latents."""
    import matplotlib.pyplot as plt

    with styled():
        figure, axes = plt.subplots(1, len(found), figsize=(3.3 * len(found) + 1.4, 2.2), sharey=True, squeeze=False)
        for axis, (place, entry) in zip(axes[0], found.items(), strict=True):
            for row, name in enumerate(SET_NAMES):
                value = estimate_of(entry["sets"][name])
                axis.hlines(row, value.low, value.high, color="#0072b2", lw=1.6)
                axis.plot(value.mean, row, "o", color="#0072b2", ms=5)
            axis.axvline(0, color="0.4", lw=0.8)
            axis.set_title(place)
            axis.set_xlabel("share of KL that goes away")
        axes[0, 0].set_yticks(range(len(SET_NAMES)), list(SET_NAMES.values()))
        axes[0, 0].set_ylim(len(SET_NAMES) - 0.5, -0.5)
        figure.tight_layout()
    return figure
