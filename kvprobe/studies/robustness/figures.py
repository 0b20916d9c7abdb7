"""The figures of the robustness study: what a damaged cache costs, rate by rate."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.experiments.reported import Reported
from kvprobe.faults.catalogue import CATALOGUE, ENGINE, WRITTEN
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import save, styled
from kvprobe.stats import wilson
from kvprobe.studies.robustness.collect import same_task
from kvprobe.studies.robustness.config import Config
from kvprobe.studies.robustness.styles import STYLES
from kvprobe.wording import ends, estimate_of, percent

Value = Callable[[Mapping[str, Any]], Mapping[str, float] | None]


def draw_all(metrics: Mapping[str, Any], config: Config, table: Reported | None, name: str, folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG; `name` is the model's."""
    matplotlib.use("Agg")
    title = f"{name}, {metrics['items']} items of each task"
    save(accuracy_by_rate(metrics, table, title), folder / "accuracy_by_rate")
    if config.follow:
        save(kl_by_rate(metrics, title), folder / "kl_by_rate")


def accuracy_by_rate(metrics: Mapping[str, Any], table: Reported | None, title: str) -> Any:
    """Accuracy against the share that is struck: a panel per task and family of faults, a line per fault, the sound
    cache's accuracy and chance; published accuracies hollow and dashed beside what was measured."""
    figure, grid, families = _panels(metrics, title)
    with styled():
        for row, (_, faults) in zip(grid, families, strict=True):
            for axis, (name, task) in zip(row, metrics["tasks"].items(), strict=True):
                headline = task["scorers"][0]
                clean = task["clean"][headline]
                axis.axhspan(*ends(clean), color="0.92", lw=0, zorder=0)
                axis.axhline(clean["mean"], color="black", ls="--", lw=0.9, label="sound cache")
                if task["chance"] > 0:
                    axis.axhline(task["chance"], color="black", ls=":", lw=0.9, label="chance")
                _lines(axis, metrics, name, faults, lambda level, scorer=headline: level["accuracy"][scorer])
                if table is not None and same_task(name, table):
                    _published(axis, table, faults)
                axis.set_ylim(-0.03, 1.03)
        for axis in grid[:, 0]:
            axis.set_ylabel("right answers (share)")
    _finish(figure, grid)
    return figure


def kl_by_rate(metrics: Mapping[str, Any], title: str) -> Any:
    """KL from the sound cache's next-token distributions against the share that is struck, on log scales."""
    figure, grid, families = _panels(metrics, title)
    with styled():
        for row, (_, faults) in zip(grid, families, strict=True):
            for axis, name in zip(row, metrics["tasks"], strict=True):
                _lines(axis, metrics, name, faults, lambda level: level["kl"])
                axis.set_yscale("log")
        for axis in grid[:, 0]:
            axis.set_ylabel("KL from the sound cache (nats per token)")
    _finish(figure, grid)
    return figure


def loss_maps(metrics: Mapping[str, Any]) -> list[HeatMap]:
    """Fault by rate for each task that the model can do: right answers lost, by the task's first scorer."""
    found = []
    for name, task in metrics["tasks"].items():
        if task["rankable"]:
            scorer = task["scorers"][0]
            lost = {(each["fault"], each["rate"]): each["lost"][scorer]["mean"] for each in task["levels"]}
            rows = [[lost[fault, rate] for rate in metrics["rates"]] for fault in metrics["faults"]]
            table = pd.DataFrame(
                rows,
                index=pd.Index([CATALOGUE[fault].label for fault in metrics["faults"]], name="fault"),
                columns=pd.Index([f"{rate:g} %" for rate in metrics["rates"]], name="struck"),
            )
            caption = (
                f"{shown_task(name)}: right answers ({scorer}) lost to each fault, as a share of all. A sound cache "
                f"gets {percent(estimate_of(task['clean'][scorer]))} right, guessing {100 * task['chance']:.3g} %."
            )
            found.append(map_of(table, caption, "of all answers"))
    return found


def shown_task(name: str) -> str:
    """A task's name without the folders of a file."""
    kind, colon, file = name.rpartition(":")
    return f"{kind}{colon}{Path(file).name}"


def _panels(metrics: Mapping[str, Any], title: str) -> tuple[Any, Any, list[tuple[str, list[str]]]]:
    """An empty panel for each family of faults and each task. Controls, which change nothing, are not drawn."""
    import matplotlib.pyplot as plt

    drawn = [name for name in metrics["faults"] if not CATALOGUE[name].control]
    families = [(family, [name for name in drawn if CATALOGUE[name].family == family]) for family in (WRITTEN, ENGINE)]
    families = [(family, faults) for family, faults in families if faults] or [(WRITTEN, [])]
    tasks, rates = metrics["tasks"], metrics["rates"]
    with styled():
        figure, grid = plt.subplots(
            len(families),
            len(tasks),
            figsize=(3.0 + max(5.4, 2.9 * len(tasks)), 0.5 + 3.0 * len(families)),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for row, (family, _) in zip(grid, families, strict=True):
            for axis, (name, task) in zip(row, tasks.items(), strict=True):
                axis.set_title(shown_task(name) + ("" if task["rankable"] else " (too hard: not ranked)"))
                axis.set_xscale("log")
                axis.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=7.5)
                axis.set_xticks([], minor=True)
                axis.set_xlim(rates[0] / 1.35, rates[-1] * 1.35)
            row[0].annotate(family, (0, 1.13), xycoords="axes fraction", fontsize=9.5, weight="bold")
        for axis in grid[-1]:
            axis.set_xlabel("struck (% of the slots)")
        figure.suptitle(title, fontsize=10)
    return figure, grid, families


def _lines(axis: Any, metrics: Mapping[str, Any], task: str, faults: Sequence[str], value: Value) -> None:
    """A line with intervals for each fault; where there is no number there is no point."""
    for name, shift in zip(faults, _offsets(len(faults), metrics["rates"]), strict=True):
        style = STYLES[name]
        levels = [level for level in metrics["tasks"][task]["levels"] if level["fault"] == name]
        points = [(level["rate"], value(level)) for level in levels]
        known = [(rate * shift, point) for rate, point in points if point is not None]
        means = np.array([point["mean"] for _, point in known])
        lows, highs = np.array([ends(point) for _, point in known]).reshape(-1, 2).T
        below, above = means - lows, highs - means
        axis.errorbar(
            [rate for rate, _ in known],
            means,
            yerr=np.clip([below, above], 0, None),
            color=style.colour,
            marker=style.marker,
            ls=style.dashes,
            lw=1.3,
            ms=4.5,
            elinewidth=0.8,
            label=CATALOGUE[name].label,
        )


def _published(axis: Any, table: Reported, faults: Sequence[str]) -> None:
    """What was published, with the intervals of its sample size."""
    for name, shift in zip(faults, _offsets(len(faults), table.rates), strict=True):
        if name not in table.rows:
            continue
        shares = [wilson(share * table.samples, table.samples) for share in table.rows[name]]
        means = np.array([share.mean for share in shares])
        spans = [means - [share.low for share in shares], np.array([share.high for share in shares]) - means]
        style = STYLES[name]
        axis.errorbar(
            np.array(table.rates) * shift * 1.03,
            means,
            yerr=spans,
            color=style.colour,
            marker=style.marker,
            mfc="white",
            ls="--",
            lw=0.9,
            ms=5,
            elinewidth=0.6,
            label=f"{CATALOGUE[name].label}, published",
        )


def _offsets(count: int, rates: Sequence[float]) -> Any:
    """By what the rates of each of so many lines are multiplied, so that their intervals do not cover each other."""
    nearest = min((np.log(high / low) for low, high in pairwise(rates)), default=1.0)
    half = min(0.17, 0.3 * nearest)
    return np.exp(np.linspace(-half, half, count)) if count > 1 else np.ones(count)


def _finish(figure: Any, grid: Any) -> None:
    """Room for titles, and each row's legend to its right."""
    for row in grid:
        found = {label: handle for axis in row for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        row[-1].legend(
            found.values(), found.keys(), loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, handlelength=2.6
        )
    figure.tight_layout(h_pad=2.2)
