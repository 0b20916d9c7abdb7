"""The figures of the band study."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import save, styled
from kvprobe.studies.bands.analyse import conditions
from kvprobe.studies.bands.collect import CUTS, SINGLES
from kvprobe.studies.bands.config import Config
from kvprobe.wording import ends

NOISE_NAMES = {
    "layer": "noise at the layer's scale",
    "head": "noise at each head's scale",
    "channel": "noise with each head's channel covariance",
    "effect": "noise of equal effect",
}
NOISE_LABELS = {
    "layer": "the layer's scale",
    "head": "each head's scale",
    "channel": "channel covariance",
    "effect": "equal effect",
}
PART_LABELS = {"kv": "K and V", "k": "K alone", "v": "V alone"}
BAND_STYLES = {
    "quarter 1": ("#0072b2", "o", "-"),
    "quarter 2": ("#56b4e9", "s", "-"),
    "quarter 3": ("#009e73", "^", "-"),
    "quarter 4": ("#d55e00", "D", "-"),
    "half 1": ("#0072b2", "v", "--"),
    "half 2": ("#d55e00", "P", "--"),
    "all": ("black", "X", ":"),
}
NOISE_STYLES = {
    "layer": ("#d55e00", "o", "-"),
    "head": ("#e69f00", "s", "--"),
    "channel": ("#0072b2", "^", "-"),
    "effect": ("#009e73", "D", "-."),
}
RATE_COLOURS = ("#56b4e9", "#0072b2", "#332288", "#7f7f7f", "#000000")
_SMALLEST = 1e-7
"""Nats below which a log scale shows nothing more: an interval that reaches zero is cut here."""


def draw_all(metrics: Mapping[str, Any], config: Config, name: str, folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG; `name` is the model's."""
    matplotlib.use("Agg")
    for place, task in enumerate(metrics["tasks"]):
        title = f"{name}, {task['task'].partition(':')[0]}, {task['items']} items"
        if task["judged"]:
            save(accuracy_by_band(metrics, task, config, title), folder / file_of("accuracy_by_band", place))
        if config.follow:
            save(kl_by_band(metrics, task, config, title), folder / file_of("kl_by_band", place))
            if config.single:
                save(kl_by_layer(task, config, title), folder / file_of("kl_by_layer", place))


def file_of(figure: str, place: int) -> str:
    """The file of a task's figure; the first task's has no number."""
    return figure if place == 0 else f"{figure}_{place + 1}"


def main_part(config: Config) -> str:
    """The part that stands first: K and V together, as in canarypwn's article, unless the config leaves that out."""
    return conditions(config)[0][1]


def accuracy_by_band(metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, title: str) -> Any:
    """Figure 3 of canarypwn's article, once for each way to match the noise: accuracy against rate, a line per band.

    The article's own points stand beside those under noise at the layer's scale, if they were asked for."""
    import matplotlib.pyplot as plt

    part = main_part(config)
    noises = [noise for noise, parts in conditions(config) if parts == part]
    beside = task.get("published") if part == "kv" else None
    columns = min(2, len(noises))
    lines = -(-len(noises) // columns)
    rates = config.rates
    with styled():
        figure, grid = plt.subplots(
            lines, columns, figsize=(9.6, 1.5 + 3.1 * lines), sharex=True, sharey=True, squeeze=False
        )
        for spare in grid.flat[len(noises) :]:
            spare.set_visible(False)
        for axis, noise in zip(grid.flat, noises, strict=False):
            for place, band in enumerate(metrics["bands"]):
                cells = _cells(task, CUTS, noise, part, band=band)
                colour, marker, dashes = BAND_STYLES[band]
                # Side by side within a rate, so that intervals do not hide each other.
                where = [_aside(cell["rate"], place, len(metrics["bands"]), rates) for cell in cells]
                _errorbar(
                    axis,
                    where,
                    [cell["accuracy"] for cell in cells],
                    colour,
                    marker,
                    dashes,
                    _band_label(metrics, band),
                )
                if beside is not None and noise == "layer":
                    _seed_points(axis, beside, band, place, len(metrics["bands"]), rates)
            axis.axhline(task["clean"]["mean"], color="0.35", ls="--", lw=0.9, label="clean cache, interval grey")
            axis.axhspan(*ends(task["clean"]), color="0.35", alpha=0.1, lw=0)
            if task["chance"]:
                axis.axhline(task["chance"], color="0.35", ls=":", lw=0.9, label="chance")
            axis.set_title(NOISE_NAMES[noise])
            axis.set_ylim(-0.03, 1.03)
            _rate_axis(axis, rates)
        for axis in grid[:, 0]:
            axis.set_ylabel("accuracy (share of items)")
        for axis in grid[-1]:
            axis.set_xlabel("slots struck in the band (%, log scale)")
        _legend_below(figure, grid[0, 0], f"{title}: noise in {PART_LABELS[part]}, 95 % intervals", 3)
    return figure


def kl_by_band(metrics: Mapping[str, Any], task: Mapping[str, Any], config: Config, title: str) -> Any:
    """KL of every band: a column for each way to match the noise, a row for each part, a colour for each rate."""
    import matplotlib.pyplot as plt

    noises, parts = (list(dict.fromkeys(each)) for each in zip(*conditions(config), strict=True))
    rates = config.rates
    bands = list(metrics["bands"])
    with styled():
        figure, grid = plt.subplots(
            len(parts),
            len(noises),
            figsize=(1.6 + 2.1 * max(len(noises), 2), 1.7 + 1.9 * len(parts)),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for row, part in zip(grid, parts, strict=True):
            for axis, noise in zip(row, noises, strict=True):
                for place, rate in enumerate(rates):
                    cells = _cells(task, CUTS, noise, part, rate=rate)
                    known = [(bands.index(cell["band"]), cell["kl"]) for cell in cells if cell["kl"] is not None]
                    where = [index + 0.5 * (place - (len(rates) - 1) / 2) / len(rates) for index, _ in known]
                    colour = RATE_COLOURS[place % len(RATE_COLOURS)]
                    _errorbar(
                        axis, where, [kl for _, kl in known], colour, "osD^v"[place % 5], "none", f"{rate:g} %", True
                    )
                axis.set_yscale("log")
                axis.set_xticks(range(len(bands)), bands, rotation=90)
                axis.grid(axis="y", color="0.9", lw=0.6)
                if axis in grid[0]:
                    axis.set_title(NOISE_LABELS[noise])
            row[0].set_ylabel(f"noise in {PART_LABELS[part]}\nKL per token (nats)")
        _legend_below(
            figure, grid[0, 0], f"{title}: KL from the clean run by band, 95 % intervals", len(rates), "slots struck:"
        )
    return figure


def kl_by_layer(task: Mapping[str, Any], config: Config, title: str) -> Any:
    """KL of every single layer: a panel for each part, a line for each way to match the noise, intervals as bands."""
    import matplotlib.pyplot as plt

    noises, parts = (list(dict.fromkeys(each)) for each in zip(*conditions(config), strict=True))
    with styled():
        figure, panels = plt.subplots(
            len(parts), 1, figsize=(9.0, 1.3 + 2.1 * len(parts)), sharex=True, sharey=True, squeeze=False
        )
        for axis, part in zip(panels[:, 0], parts, strict=True):
            for noise in noises:
                cells = [cell for cell in _cells(task, SINGLES, noise, part) if cell["kl"] is not None]
                layers = [cell["first"] for cell in cells]
                colour, marker, dashes = NOISE_STYLES[noise]
                spans = [(cell["kl"]["mean"], *ends(cell["kl"])) for cell in cells]
                means, lows, highs = np.maximum(np.array(spans).reshape(-1, 3), _SMALLEST).T
                axis.fill_between(layers, lows, highs, color=colour, alpha=0.15, lw=0)
                axis.plot(layers, means, color=colour, marker=marker, ls=dashes, ms=3.5, label=NOISE_LABELS[noise])
            axis.set_yscale("log")
            axis.set_ylabel(f"noise in {PART_LABELS[part]}\nKL per token (nats)")
            axis.grid(axis="y", color="0.9", lw=0.6)
        panels[-1, 0].set_xlabel("layer that is struck")
        panels[-1, 0].xaxis.get_major_locator().set_params(integer=True)
        _legend_below(
            figure,
            panels[0, 0],
            f"{title}: {config.single:g} % of the slots of one layer struck, 95 % intervals",
            len(noises),
            "noise matched to:",
        )
    return figure


def layer_map(task: Mapping[str, Any]) -> HeatMap:
    """KL of every single layer under each noise in each part; missing where too many rows broke."""
    cells = [cell for cell in task["cells"] if cell["group"] == SINGLES]
    rows = pd.DataFrame(
        {
            "layer": [cell["first"] for cell in cells],
            "noise matched to": [f"{NOISE_LABELS[cell['noise']]}, in {PART_LABELS[cell['parts']]}" for cell in cells],
            "kl": [cell["kl"] and cell["kl"]["mean"] for cell in cells],
        }
    )
    table = rows.pivot(index="layer", columns="noise matched to", values="kl")
    return map_of(
        table.reindex(columns=rows["noise matched to"].unique()),
        f"KL from the clean run with {cells[0]['rate']:g} % of the slots of one layer struck, mean over items.",
        "nats per token",
    )


def _cells(
    task: Mapping[str, Any], group: str, noise: str, parts: str, band: str | None = None, rate: float | None = None
) -> list[Mapping[str, Any]]:
    return [
        cell
        for cell in task["cells"]
        if (cell["group"], cell["noise"], cell["parts"]) == (group, noise, parts)
        and band in (None, cell["band"])
        and rate in (None, cell["rate"])
    ]


def _band_label(metrics: Mapping[str, Any], band: str) -> str:
    first, last = metrics["bands"][band]
    return f"{band} (L{first}–{last})"


def _aside(rate: float, place: int, places: int, rates: Sequence[float]) -> float:
    """Where on a log axis the point of one of several bands at this rate stands."""
    closest = min((high / low for low, high in pairwise(rates)), default=2.0)
    return rate * closest ** (0.6 * (place - (places - 1) / 2) / places)


def _rate_axis(axis: Any, rates: Sequence[float]) -> None:
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.minorticks_off()


def _errorbar(
    axis: Any,
    where: Sequence[float],
    values: Sequence[Mapping[str, float]],
    colour: str,
    marker: str,
    dashes: str,
    label: str,
    positive: bool = False,
) -> None:
    floor = _SMALLEST if positive else 0.0
    spans = np.array([(value["mean"], *ends(value)) for value in values]).reshape(-1, 3)
    means, lows, highs = np.maximum(spans, floor).T
    errors = np.clip([means - lows, highs - means], 0, None)
    axis.errorbar(
        where, means, yerr=errors, color=colour, marker=marker, ls=dashes, ms=4.5, lw=1.1, elinewidth=0.8, label=label
    )


def _seed_points(
    axis: Any, beside: Mapping[str, Any], band: str, place: int, places: int, rates: Sequence[float]
) -> None:
    rows = [row for row in beside["rows"] if row["band"] == band]
    where = [_aside(row["rate"], place, places, rates) for row in rows]
    colour, marker, _ = BAND_STYLES[band]
    accuracies = [row["theirs"]["mean"] for row in rows]
    axis.plot(where, accuracies, marker=marker, mfc="white", mec=colour, ls="none", ms=7, zorder=5)
    if place == 0:
        axis.plot([], [], marker="o", mfc="white", mec="0.2", ls="none", ms=7, label="canarypwn (open)")


def _legend_below(figure: Any, axis: Any, title: str, columns: int, heading: str | None = None) -> None:
    handles, labels = axis.get_legend_handles_labels()
    rows = -(-len(labels) // columns)
    figure.suptitle(title, fontsize=10)
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncols=columns,
        frameon=False,
        handlelength=3,
        title=heading,
        title_fontsize=8.5,
    )
    room = 0.1 + 0.19 * (rows + (heading is not None))
    figure.tight_layout(rect=(0, room / figure.get_figheight(), 1, 1))
