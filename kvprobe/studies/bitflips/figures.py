"""The figures of the bit-flip study."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import save, styled
from kvprobe.studies.bitflips.analyse import harm, of_field
from kvprobe.studies.bitflips.collect import ANY, FIELDS
from kvprobe.wording import ends, whiskers

BREAKS, LOUD, WORDS, NOTHING = "#d55e00", "#222222", "#56b4e9", "#e3e3e3"
LINES = {
    ANY: ("any bit", "black", "o", "-"),
    "sign": ("sign bits", "#0072b2", "s", "--"),
    "exponent": ("exponent bits", "#d55e00", "^", "-."),
    "mantissa": ("mantissa bits", "#009e73", "v", ":"),
}
LEAST_KL = 1e-10
"""Nats below which a KL is drawn at the lower edge: float32 holds no less."""


def draw_all(metrics: Mapping[str, Any], name: str, folder: Path) -> None:
    """Draw every figure of every task into `folder` as PNG and SVG; `name` is the model's."""
    matplotlib.use("Agg")
    for number, task in enumerate(metrics["tasks"], start=1):
        title = f"{name}, {task['task']}"
        save(shares_by_bit(task, title), folder / f"shares_by_bit_{number}")
        if has_kl(task):
            save(kl_by_bit(task, title), folder / f"kl_by_bit_{number}")
        save(damage_by_rate(task, title), folder / f"damage_by_rate_{number}")


def has_kl(task: Mapping[str, Any]) -> bool:
    """Whether KL was measured at all."""
    return any(dtype["all"]["kl"] is not None for dtype in task["dtypes"])


def shares_by_bit(task: Mapping[str, Any], title: str) -> Any:
    """What flips of each bit do, stacked: a panel per dtype, the sign on the left, the lowest mantissa bit on the
    right."""
    ranked = task["too_hard"] is None
    items = f"{task['right'] if ranked else task['items']} items" + (" answered rightly" if ranked else "")
    with styled():
        figure, axes = _panels(task)
        for axis, dtype in zip(axes, task["dtypes"], strict=True):
            bits = dtype["bits"][::-1]
            places = np.arange(len(bits))
            shares = [each["right"] if ranked else each for each in bits]
            bad = [harm(each, ranked).record() for each in bits]
            bottom = np.zeros(len(bits))
            for label, colour, heights in _stack(shares, ranked):
                axis.bar(places, heights, 0.86, bottom=bottom, color=colour, label=label, lw=0)
                bottom = bottom + heights
            axis.errorbar(
                places,
                100 * np.array([each["mean"] for each in bad]),
                yerr=_errors(bad),
                fmt="none",
                ecolor="#7a3300",
                elinewidth=0.9,
                capsize=1.5,
                label="95 % interval of what breaks" if ranked else "95 % interval of what differs",
            )
            axis.set_ylim(0, 100)
            axis.set_ylabel(f"{dtype['dtype']}: share of flips (%)")
            _name_bits(axis, bits)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.suptitle(f"What a single flipped bit does. {title}, {items}", fontsize=10)
        _finish(figure, handles, labels)
    return figure


def kl_by_bit(task: Mapping[str, Any], title: str) -> Any:
    """Mean KL from the clean run by bit, with intervals; flips that left numbers not finite are counted above."""
    from matplotlib.lines import Line2D

    with styled():
        figure, axes = _panels(task)
        for axis, dtype in zip(axes, task["dtypes"], strict=True):
            bits = dtype["bits"][::-1]
            for place, each in enumerate(bits):
                if each["kl"] is not None:
                    mean, low, high = (max(value, LEAST_KL) for value in (each["kl"]["mean"], *ends(each["kl"])))
                    axis.plot([place, place], [low, high], color="#0072b2", lw=1.2)
                    axis.plot(place, mean, "o", color="#0072b2", ms=4)
                if each["nonfinite_flips"]:
                    axis.annotate(
                        str(each["nonfinite_flips"]),
                        (place, 0.985),
                        xycoords=("data", "axes fraction"),
                        ha="center",
                        va="top",
                        fontsize=7.5,
                        color=BREAKS,
                    )
            axis.set_yscale("log")
            axis.set_ylim(LEAST_KL / 2, 100)
            axis.set_ylabel(f"{dtype['dtype']}: KL (nats)")
            _name_bits(axis, bits)
        handles = [
            Line2D([], [], color="#0072b2", marker="o", ms=4, lw=1.2),
            Line2D([], [], color=BREAKS, marker="$n$", ls="none"),
        ]
        labels = [
            "mean over flips and items, 95 % interval",
            f"number of flips left out, not finite (of {task['dtypes'][0]['bits'][0]['flips']} at each bit)",
        ]
        figure.suptitle(f"Distance from the clean run by bit. {title}, {task['items']} items", fontsize=10)
        _finish(figure, handles, labels)
    return figure


def damage_by_rate(task: Mapping[str, Any], title: str) -> Any:
    """Accuracy against the error rate, a line per field; answers that changed, where accuracy says nothing."""
    import matplotlib.pyplot as plt

    ranked = task["too_hard"] is None
    measure = "accuracy" if ranked else "changed"
    numbers = task["numbers"]
    with styled():
        figure, axis = plt.subplots(figsize=(7.2, 4.6))
        if ranked:
            axis.axhspan(*(100 * end for end in ends(task["clean"])), color="0.5", alpha=0.15, lw=0)
            axis.axhline(100 * task["clean"]["mean"], color="0.35", lw=0.9, label="clean")
            axis.axhline(100 * task["chance"], color="black", ls=":", lw=0.9, label="chance")
        for place, field in enumerate(FIELDS):
            label, colour, marker, dashes = LINES[field]
            rates = of_field(task, field)
            # Side by side, so that intervals do not overlap.
            across = [each["rate"] * 1.09 ** (place - 1.5) for each in rates]
            values = [each[measure] for each in rates]
            axis.errorbar(
                across,
                [100 * each["mean"] for each in values],
                yerr=_errors(values),
                label=label,
                color=colour,
                marker=marker,
                ls=dashes,
                ms=5,
                lw=1.3,
                elinewidth=0.9,
                capsize=2,
            )
        axis.set_xscale("log")
        axis.set_ylim(-2, 102)
        axis.set_xlabel("share of all numbers of K and V with one flipped bit")
        axis.set_ylabel("accuracy (%)" if ranked else "answers that changed (%)")
        above = axis.secondary_xaxis("top", functions=(lambda rate: rate * numbers, lambda count: count / numbers))
        above.set_xlabel("expected flips in the whole cache", fontsize=8.5)
        handles, labels = axis.get_legend_handles_labels()
        dtype = task["dtypes"][0]["dtype"]
        figure.suptitle(f"Flips at a rate, numbers stored in {dtype}. {title}, {task['items']} items", fontsize=10)
        _finish(figure, handles, labels)
    return figure


def bit_maps(task: Mapping[str, Any]) -> list[HeatMap]:
    """Bit by dtype: flips that break a right answer and flips that reword it; flips that change it, where right says
    nothing."""
    ranked = task["too_hard"] is None
    told: dict[str, Callable[[Any], float]] = {
        "break a right answer" if ranked else "change the answer": lambda each: harm(each, ranked).mean
    }
    if ranked:
        told["change the words of an answer that stays right"] = lambda each: each["right"]["words"]["mean"]

    def table(value: Callable[[Any], float]) -> pd.DataFrame:
        shares = {each["dtype"]: {bit["bit"]: value(bit) for bit in each["bits"]} for each in task["dtypes"]}
        return pd.DataFrame(shares).sort_index().rename_axis(index="bit", columns="dtype")

    items = f"{task['right']} items answered rightly" if ranked else f"{task['items']} items"
    return [
        map_of(
            table(value),
            f"Share of single flips that {what}, mean over {items}; bit 0 is the lowest of the mantissa.",
            "of the flips",
        )
        for what, value in told.items()
    ]


def _stack(shares: Sequence[Mapping[str, Any]], ranked: bool) -> list[tuple[str, str, Any]]:
    """What lies above what, from below, in percent."""

    def of(name: str) -> Any:
        return 100 * np.array([each[name]["mean"] for each in shares])

    if not ranked:
        return [
            ("not finite", LOUD, of("nonfinite")),
            ("another answer", BREAKS, of("different")),
            ("same answer", NOTHING, of("same")),
        ]
    return [
        ("breaks: not finite", LOUD, of("nonfinite")),
        ("breaks: wrong answer", BREAKS, of("breaks") - of("nonfinite")),
        ("other words, still right", WORDS, of("words")),
        ("nothing: same answer", NOTHING, of("nothing")),
    ]


def _panels(task: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    """A panel per dtype, one below the other."""
    import matplotlib.pyplot as plt

    count = len(task["dtypes"])
    figure, axes = plt.subplots(count, 1, figsize=(8.4, 1.1 + 2.3 * count), squeeze=False)
    return figure, list(axes[:, 0])


def _name_bits(axis: Any, bits: Sequence[Mapping[str, Any]]) -> None:
    """Number the bits, and say above which field they belong to."""
    axis.set_xticks(range(len(bits)), [str(each["bit"]) for each in bits])
    axis.tick_params(axis="x", labelsize=7.5, length=2)
    axis.set_xlim(-0.6, len(bits) - 0.4)
    axis.set_xlabel("bit (the lowest of the mantissa is 0)")
    start = 0
    for field, members in groupby(bits, key=lambda each: each["field"]):
        stop = start + len(list(members))
        if start:
            axis.axvline(start - 0.5, color="black", lw=0.9, ls=(0, (4, 2)))
        axis.annotate(
            field,
            ((start + stop - 1) / 2, 1.03),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
        )
        start = stop


def _errors(values: Sequence[Mapping[str, float]]) -> Any:
    """How far intervals reach below and above, in percent."""
    return 100 * np.hstack([whiskers(each) for each in values])


def _finish(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put the legend below the panels."""
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, handlelength=2.4)
    figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1))
