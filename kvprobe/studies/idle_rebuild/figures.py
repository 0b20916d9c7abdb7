"""The figures of the idle-rebuild study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from kvprobe.experiments.maps import map_of
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import ARM_COLOURS, save, styled
from kvprobe.studies.idle_rebuild.collect import AFTER, CONTROLS, MEASURED, SHARED
from kvprobe.wording import ends

ARM_NAMES = {
    "kept": "kept: nothing ever hidden",
    "compacted": "compacted: T1 to T3 masked, cache kept",
    "in_place": "rebuilt in place: recomputed, positions kept",
    "rebuilt": "rebuilt: recomputed, positions from 0",
    "control": "rebuilt before the compaction (control)",
}
COLOURS = {
    "kept": ARM_COLOURS["direct"],
    "compacted": ARM_COLOURS["masked"],
    "in_place": "#e69f00",
    "rebuilt": ARM_COLOURS["restart"],
    "control": ARM_COLOURS["before"],
}
FAMILY_NAMES = {"k": "K (keys)", "v": "V (values)"}
DRIFTING = [segment for segment in SHARED if segment != "system"]
"""Segments that may differ: the system prompt stands before everything that is hidden."""
_COMPACTION = AFTER[0] - 0.5
"""Where it stands on an axis of turns."""
_NOTE: dict[str, Any] = {"color": "0.35", "fontsize": 8}


def draw_all(layers: Any, metrics: dict[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    save(drift_by_turn(metrics["by_turn"]), folder / "drift_by_turn")
    save(rebuild_matrix(metrics["matrix"]), folder / "rebuild_matrix")
    save(drift_by_distance(metrics["healing"]["cells"]), folder / "drift_by_distance")
    save(drift_by_layer(layers), folder / "drift_by_layer")
    save(drift_in_reply(metrics["in_reply"]), folder / "drift_in_reply")


def drift_by_turn(by_turn: Mapping[str, Any]) -> Any:
    """Divergence from two runs, and log-probability lost, turn by turn; bands are 95 % intervals."""
    import matplotlib.pyplot as plt

    panels = {
        "kl_from_compacted": ("KL from the compacted run", ("in_place", "rebuilt", "control")),
        "kl_from_kept": ("KL from the run that saw everything", ("compacted", "in_place", "rebuilt")),
        "nll_over_compacted": ("surprise above the compacted run's", ("kept", "in_place", "rebuilt")),
    }
    with styled():
        figure, axes = plt.subplots(1, len(panels), figsize=(10.5, 3.5))
        for axis, (key, (title, arms)) in zip(axes, panels.items(), strict=True):
            for arm in arms:
                turns = [turn for turn in MEASURED if str(turn) in by_turn[arm]]
                _band(axis, turns, [by_turn[arm][str(turn)][key] for turn in turns], COLOURS[arm], ARM_NAMES[arm])
            axis.axvline(_COMPACTION, color="0.35", ls=":", lw=0.9)
            axis.axhline(0, color="0.35", lw=0.6)
            axis.set_title(title)
            axis.set_xlabel("turn")
            axis.set_xticks(MEASURED)
            axis.set_xlim(MEASURED[0] - 0.3, MEASURED[-1] + 0.3)
        axes[0].set_ylabel("nats per token of the scripted reply")
        for axis in axes[:2]:
            # A little below 0, so that a control that lies there is seen.
            axis.set_ylim(bottom=-0.03 * axis.get_ylim()[1])
        axes[0].text(
            _COMPACTION - 0.1, axes[0].get_ylim()[1], "the compaction", **_NOTE, rotation=90, ha="right", va="top"
        )
        _legend_below(figure, axes)
    return figure


def rebuild_matrix(matrix: Mapping[str, Any]) -> Any:
    """Divergence from the compacted run by the turn before which the cache was dropped, and the turn measured."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    table = np.full((len(MEASURED), len(MEASURED)), np.nan)
    for row, before in enumerate(MEASURED):
        for column, turn in enumerate(MEASURED):
            if turn >= before:
                table[row, column] = matrix[f"rebuilt{before}"][str(turn)]["mean"]
    with styled():
        figure, axis = plt.subplots(figsize=(6.4, 4.2))
        sns.heatmap(
            table,
            ax=axis,
            mask=np.isnan(table),
            annot=np.vectorize(_short)(table),
            fmt="",
            vmin=0,
            cmap="rocket_r",
            linewidths=1,
            xticklabels=[str(turn) for turn in MEASURED],
            yticklabels=[str(turn) for turn in MEASURED],
            cbar_kws={"label": "KL(compacted ‖ rebuilt), nats per token"},
        )
        axis.axhline(len(CONTROLS), color="0.35", ls=":", lw=1.2)
        axis.text(0.1, len(CONTROLS) + 0.1, "the compaction", **_NOTE, va="top")
        axis.set_xlabel("measured at turn")
        axis.set_ylabel("cache dropped before turn")
        axis.tick_params(axis="y", rotation=0)
        figure.tight_layout()
    return figure


def drift_by_distance(cells: Sequence[Sequence[Mapping[str, float] | None]]) -> Any:
    """Divergence at each question by how many turns were read since the summary; dots are where it belongs."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    with styled():
        figure, axis = plt.subplots(figsize=(6.4, 3.6))
        for row, (turn, colour) in enumerate(zip(AFTER, sns.color_palette("viridis", len(AFTER)), strict=True)):
            there = [cell for cell in cells[row] if cell is not None]
            _band(axis, range(len(there)), there, colour, f"question of turn {turn}")
            axis.plot([row], [there[row]["mean"]], "o", color=colour, markersize=6)
        axis.set_xticks(range(len(AFTER)))
        axis.set_xlabel("turns read between the summary and the question")
        axis.set_ylabel("KL(compacted ‖ rebuilt), nats per token")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
        figure.tight_layout()
    return figure


def drift_by_layer(layers: Any) -> Any:
    """How far K and V are from the compacted run's, by layer and segment."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    colours = ["0.1", *sns.color_palette("viridis", len(AFTER))]
    with styled():
        figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.6))
        for axis, (family, name) in zip(axes, FAMILY_NAMES.items(), strict=True):
            for segment, colour in zip(DRIFTING, colours, strict=True):
                line = layers[(layers["family"] == family) & (layers["segment"] == segment)].sort_values("layer")
                axis.fill_between(line["layer"], line["low"], line["high"], color=colour, alpha=0.18, lw=0)
                axis.plot(line["layer"], line["distance"], color=colour, label=segment)
            axis.set_title(name)
            axis.set_xlabel("layer")
            axis.set_ylim(bottom=0)
        axes[0].set_ylabel("‖rebuilt in place − compacted‖ / ‖compacted‖")
        axes[0].legend(frameon=False)
        figure.tight_layout()
    return figure


def layer_maps(layers: Any) -> list[HeatMap]:
    """Layer by segment for K and V: the means that `drift_by_layer` draws."""
    return [
        map_of(
            layers[layers["family"] == family].pivot(index="layer", columns="segment", values="distance")[DRIFTING],
            f"{name}: distance of the run rebuilt in place from the compacted one, relative to the compacted one's "
            "size, mean over sessions.",
            "of its size",
        )
        for family, name in FAMILY_NAMES.items()
    ]


def drift_in_reply(in_reply: Mapping[str, Any]) -> Any:
    """Divergence from the compacted run, token by token of the reply."""
    import matplotlib.pyplot as plt

    titles = {"scripted": "the scripted reply", "own": "the reply that the compacted run would give"}
    with styled():
        figure, axes = plt.subplots(1, len(titles), figsize=(10.5, 3.5), sharey=True)
        for axis, (key, title) in zip(axes, titles.items(), strict=True):
            for arm, line in in_reply[key].items():
                _band(axis, range(1, len(line) + 1), line, COLOURS[arm], ARM_NAMES[arm])
            axis.set_title(title)
            axis.set_xlabel("token of the reply")
            axis.set_yscale("log")
        axes[0].set_ylabel("KL from the compacted run (nats)")
        _legend_below(figure, axes)
    return figure


def _short(value: float) -> str:
    """A number for a cell; one that is zero but for round-off keeps its size."""
    if np.isnan(value) or value == 0:
        return "" if np.isnan(value) else "0"
    return f"{value:.3f}" if value >= 5e-4 else f"{value:.0e}"


def _band(axis: Any, places: Sequence[int], line: Sequence[Mapping[str, float]], colour: Any, name: str) -> None:
    low, high = zip(*(ends(value) for value in line), strict=True)
    mean = [value["mean"] for value in line]
    axis.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
    axis.plot(places, mean, color=colour, label=name)


def _legend_below(figure: Any, axes: Any) -> None:
    """One legend for all panels, each run once."""
    found = {}
    for axis in axes:
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    ordered = {name: found[name] for name in ARM_NAMES.values() if name in found}
    figure.legend(ordered.values(), ordered.keys(), loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1))
