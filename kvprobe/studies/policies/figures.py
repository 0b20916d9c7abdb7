"""The figures of the policies study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import save, styled
from kvprobe.studies.policies.analyse import full_condition, judged_budgets
from kvprobe.studies.policies.collect import FULL, KINDS, RANDOM
from kvprobe.studies.policies.config import Config
from kvprobe.tasks.instructions import PLACES
from kvprobe.wording import ends

PANELS = {
    "kl": "KL from the full cache (nats, log scale)",
    "agreement": "next token as with the full cache (share)",
    "code": "digits of the hidden code recalled (share)",
    "instructions": "instructions followed (share)",
}
MAPS = {
    "kl": ("KL from the full cache, more being worse", "nats"),
    "agreement": ("Next tokens as with the full cache, less than all of them", "of the tokens"),
    "code": ("Digits of the hidden code recalled, beside the full cache", "of the code"),
    "instructions": ("Instructions followed, beside the full cache", "of the instructions"),
}
"""What a map of each measure holds, and its unit."""


def draw_all(metrics: Mapping[str, Any], config: Config, name: str, folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG; `name` is the model's."""
    matplotlib.use("Agg")
    title = f"{name}, {metrics['samples']} conversations of {metrics['full']['slots']['mean']:.0f} tokens on average"
    save(quality_by_memory(metrics, title), folder / "quality_by_memory")
    save(instructions_by_place(metrics, config, title), folder / "instructions_by_place")


def quality_by_memory(metrics: Mapping[str, Any], title: str) -> Any:
    """Each measure against the memory kept: a line per policy, the band of random eviction, the full cache and
    chance."""
    import matplotlib.pyplot as plt

    with styled():
        figure, grid = plt.subplots(2, 2, figsize=(9.6, 8.0), sharex=True)
        for axis, (measure, label) in zip(grid.flat, PANELS.items(), strict=True):
            for name in KINDS:
                _line(axis, metrics, name, measure)
            if measure != "kl":
                whole = full_condition(metrics)["measures"][measure]["mean"]
                axis.axhline(whole, color="black", ls="--", lw=0.9, label="full cache")
                axis.set_ylim(-0.02, 1.04)
            if measure in metrics["chance"]:
                axis.axhline(metrics["chance"][measure], color="black", ls=":", lw=0.9, label="chance")
            axis.set_ylabel(label)
            axis.set_xlim(0, 102)
        grid[0, 0].set_yscale("log")
        for axis in grid[-1]:
            axis.set_xlabel("memory kept (% of the full cache at 16 bits)")
        handles, labels = grid[1, 1].get_legend_handles_labels()
        figure.suptitle(title, fontsize=10)
        figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False, handlelength=3)
        figure.tight_layout(rect=(0, 0.85 / figure.get_figheight(), 1, 1))
    return figure


def instructions_by_place(metrics: Mapping[str, Any], config: Config, title: str) -> Any:
    """Share of samples that follow the instruction at each place of the system prompt, a row per policy, at each of the
    budgets that policies are judged at; policies without a budget at all their settings."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    budgets = judged_budgets(config)
    with styled():
        figure, axes = plt.subplots(1, len(budgets), figsize=(1.6 + 3.9 * len(budgets), 6.2), squeeze=False)
        for axis, budget in zip(axes[0], budgets, strict=True):
            rows = at_budget(metrics, budget)
            shares = np.array([[place["mean"] for place in each["places"]] for each in rows])
            first = axis is axes[0, 0]
            sns.heatmap(
                100 * shares,
                ax=axis,
                vmin=0,
                vmax=100,
                cmap="Blues",
                annot=True,
                fmt=".0f",
                annot_kws={"fontsize": 8},
                linewidths=0.5,
                cbar=False,
                yticklabels=[label_of(each) for each in rows] if first else False,
                xticklabels=[str(place) for place in range(1, PLACES + 1)],
            )
            axis.set_title(f"budget {budget} % of the slots")
            axis.set_xlabel("place in the system prompt")
            axis.tick_params(left=False, bottom=False)
            plt.setp(axis.get_yticklabels(), rotation=0)
        chance = 100 * metrics["chance"]["instructions"]
        figure.suptitle(f"Instructions followed (%; chance {chance:g} %). {title}", fontsize=10)
        figure.tight_layout()
    return figure


def budget_maps(metrics: Mapping[str, Any]) -> list[HeatMap]:
    """Policy by budget for each measure that can be judged: the difference from the full cache."""
    budgeted = [each for each in metrics["conditions"] if each["kind"] != FULL and not KINDS[each["kind"]].bits]
    found = []
    for measure, (what, unit) in MAPS.items():
        if metrics["judged"].get(measure, True):
            rows = pd.DataFrame(
                {
                    "policy": [KINDS[each["kind"]].label for each in budgeted],
                    "budget": [each["level"] for each in budgeted],
                    "value": [each["from_full"][measure]["mean"] for each in budgeted],
                }
            )
            table = rows.pivot(index="policy", columns="budget", values="value").loc[rows["policy"].unique()]
            caption = f"{what}, mean over conversations. Quantisation alone has no budget; it is in the tables."
            found.append(map_of(table.rename(columns="{} %".format), caption, unit))
    return found


def at_budget(metrics: Mapping[str, Any], budget: int) -> list[Mapping[str, Any]]:
    """The conditions of one budget, the full cache first, and all those that have no budget."""
    return [
        each
        for each in metrics["conditions"]
        if each["kind"] == FULL or KINDS[each["kind"]].bits or each["level"] == budget
    ]


def label_of(condition: Mapping[str, Any]) -> str:
    """What a condition is called where its budget is known."""
    if condition["kind"] == FULL:
        return "full cache"
    kind = KINDS[condition["kind"]]
    return f"quantised ({condition['level']} bits)" if kind.bits else kind.label


def _line(axis: Any, metrics: Mapping[str, Any], name: str, measure: str) -> None:
    kind = KINDS[name]
    points = sorted((each for each in metrics["conditions"] if each["kind"] == name), key=lambda each: each["memory"])
    if measure == "kl":
        # A condition that changes nothing has a KL of zero, which a log scale cannot show.
        points = [each for each in points if each["memory"] < 1]
    memory = [100 * each["memory"] for each in points]
    values = [each["measures"][measure] for each in points]
    if name == RANDOM:
        lows, highs = zip(*(ends(value) for value in values), strict=True)
        axis.fill_between(memory, lows, highs, color=kind.colour, alpha=0.2, lw=0, label=f"{kind.label}, 95 % interval")
    axis.plot(
        memory,
        [value["mean"] for value in values],
        color=kind.colour,
        marker=kind.marker,
        ls=kind.dashes or "none",
        lw=1.3,
        ms=9 if kind.marker == "*" else 5,
        label=kind.label,
        zorder=3 if kind.dashes else 4,
    )
    if kind.bits:
        for each, x, value in zip(points, memory, values, strict=True):
            axis.annotate(str(each["level"]), (x, value["mean"]), (5, -9), textcoords="offset points", fontsize=7)
