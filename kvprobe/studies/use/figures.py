"""The figures of the use study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvprobe.experiments.maps import map_of
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.report.document import HeatMap
from kvprobe.report.plots import heat, save, styled
from kvprobe.studies.use.analyse import found
from kvprobe.studies.use.check import ANEW, INTACT, SAME
from kvprobe.studies.use.effects import BOTH, CODE_MASKED, ERASE, FULL, IN_VIEW, SWAP, TURN_MASKED
from kvprobe.studies.use.fit import INLP, LEACE, RANDOM
from kvprobe.studies.use.read import PARTS, PLACES
from kvprobe.wording import estimate_of

SITES = ((IN_VIEW, "code"), (IN_VIEW, "after"), (CODE_MASKED, "after"), (TURN_MASKED, "summary"))
SITE_NAMES = {
    (IN_VIEW, "code"): "the code's own slots",
    (IN_VIEW, "after"): "its turn after it",
    (CODE_MASKED, "after"): "its turn after it,\nthe code's slots masked",
    (TURN_MASKED, "summary"): "the summary,\nboth turns masked",
}
PLACE_NAMES = {"code": "the code's own slots", "after": "its turn after it", "summary": "the summary"}
PART_NAMES = {"K": "K", "V": "V", BOTH: "K and V"}
EDITS = {LEACE: "LEACE, the probe's subspace", RANDOM: "random, same rank", FULL: "the whole vectors"}
COLOURS = {LEACE: "#d55e00", RANDOM: "#009e73", FULL: "#7f7f7f", INTACT: "#0072b2", INLP: "#cc79a7"}


def draw_all(metrics: Mapping[str, Any], folder: Path) -> None:
    """Draw every figure into `folder` as PNG and SVG."""
    matplotlib.use("Agg")
    save(read_and_used(metrics), folder / "read_and_used")
    save(by_band(metrics), folder / "by_band")
    save(doses(metrics), folder / "doses")
    save(probes(metrics), folder / "probes")


def read_and_used(metrics: Mapping[str, Any]) -> Any:
    """Side by side for each place: what a probe reads of it before and after erasure, and what the model loses by
    it."""
    import matplotlib.pyplot as plt

    with styled():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.3), sharey=True)
        rows = range(len(SITES))
        for offset, state in zip((-0.2, 0, 0.2), (INTACT, LEACE, f"{RANDOM} 0"), strict=True):
            name = RANDOM if state.startswith(RANDOM) else state
            values = [accuracy(metrics, place, "V", SAME, state) for _, place in SITES]
            _points(
                left,
                values,
                [row + offset for row in rows],
                COLOURS[name],
                {INTACT: "intact"}.get(name, EDITS.get(name, "")),
            )
        left.axvline(metrics["chance"], color="0.35", ls="--", lw=0.9)
        left.set_xlabel("digits that the probe reads in V, mean over layers")
        left.set_xlim(0, 1)
        for offset, name in zip((-0.2, 0, 0.2), EDITS, strict=True):
            values = [found(metrics, "erased", view, place)["lost"][name] for view, place in SITES]
            _points(right, values, [row + offset for row in rows], COLOURS[name], EDITS[name])
        right.axvline(metrics["scale"][IN_VIEW]["margin"]["mean"], color="0.35", ls="--", lw=0.9)
        right.set_xlabel("margin of the true code lost when erased (nats)\ndashed: all that there is in view")
        left.set_yticks(rows, [SITE_NAMES[site] for site in SITES])
        left.set_ylim(len(SITES) - 0.5, -0.5)
        handles, labels = left.get_legend_handles_labels()
        more = [pair for pair in zip(*right.get_legend_handles_labels(), strict=True) if pair[1] not in labels]
        figure.legend(
            [*handles, *(handle for handle, _ in more)],
            [*labels, *(label for _, label in more)],
            loc="lower center",
            ncols=4,
            frameon=False,
        )
        figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def by_band(metrics: Mapping[str, Any]) -> Any:
    """Nats lost to the eraser beyond random subspaces, by band of layers and part, for each place."""
    import matplotlib.pyplot as plt

    tables = [band_table(metrics, *site) for site in SITES]
    limit = max(0.1, *(float(np.abs(table.to_numpy()).max()) for table in tables))
    with styled():
        figure, axes = plt.subplots(1, len(SITES), figsize=(11, 2.9), sharey=True, layout="constrained")
        for axis, table, site in zip(axes, tables, SITES, strict=True):
            heat(axis, table, limit, "nats" if axis is axes[-1] else None)
            for (row, column), value in np.ndenumerate(table.to_numpy()):
                shade = "white" if abs(value) > limit / 2 else "black"
                # Zero is added so that no cell reads −0.00.
                said = f"{round(value, 2) + 0.0:.2f}"
                axis.text(column + 0.5, row + 0.5, said, ha="center", va="center", fontsize=7, color=shade)
            axis.set(title=SITE_NAMES[site], xlabel="", ylabel="layers" if axis is axes[0] else "")
            axis.tick_params(axis="both", rotation=0)
    return figure


def band_table(metrics: Mapping[str, Any], view: str, place: str) -> pd.DataFrame:
    """Bands by part: nats of the margin lost to the eraser beyond random subspaces."""
    own = [each for each in metrics["erased"] if (each["view"], each["place"]) == (view, place)]
    table = pd.DataFrame(
        {"layers": each["band"], "part": PART_NAMES[each["part"]], "lost": each["beyond"]["mean"]} for each in own
    )
    order = [band for band in dict.fromkeys(table["layers"]) if band != EVERY_LAYER]
    order.sort(key=lambda band: int(band.split("–")[0]))
    return table.pivot(index="layers", columns="part", values="lost").loc[
        [*order, EVERY_LAYER], list(PART_NAMES.values())
    ]


def band_map(metrics: Mapping[str, Any]) -> HeatMap:
    """The same for all places on one scale, to be pointed at."""
    short = {IN_VIEW: "", CODE_MASKED: ", code masked", TURN_MASKED: ", turns masked"}
    tables = [
        band_table(metrics, view, place).rename(columns=lambda part, name=f"{place}{short[view]}": f"{name}: {part}")
        for view, place in SITES
    ]
    return map_of(
        pd.concat(tables, axis=1).rename_axis(columns="edited"),
        "Nats of the true code's margin lost to the eraser, less those lost to random subspaces: by layers, and by "
        "place and part.",
        "nats",
    )


def doses(metrics: Mapping[str, Any]) -> Any:
    """Margin lost and answer turned, by strength, at the place that the other half chose."""
    import matplotlib.pyplot as plt

    labels = {ERASE: "margin lost (nats)", SWAP: "share of the way to the other code"}
    with styled():
        figure, axes = plt.subplots(1, 2, figsize=(8.4, 3))
        for axis, kind in zip(axes, (ERASE, SWAP), strict=True):
            for name in EDITS:
                line = [each for each in metrics["doses"] if (each["kind"], each["name"]) == (kind, name)]
                line.sort(key=lambda each: each["strength"])
                strength = [each["strength"] for each in line]
                values = [estimate_of(each["value"]) for each in line]
                low, mean, high = ([getattr(each, end) for each in values] for end in ("low", "mean", "high"))
                axis.fill_between(strength, low, high, color=COLOURS[name], alpha=0.18, lw=0)
                axis.plot(strength, mean, "o-", ms=3.5, color=COLOURS[name], label=EDITS[name])
            axis.axvline(1, color="0.6", ls="--", lw=0.8, zorder=0)
            axis.axhline(0, color="0.6", lw=0.6, zorder=0)
            axis.set_xlabel(f"strength of the {'erasure' if kind == ERASE else 'exchange'}")
            axis.set_ylabel(labels[kind])
        axes[0].legend(frameon=False)
        figure.tight_layout()
    return figure


def probes(metrics: Mapping[str, Any]) -> Any:
    """Accuracy by layer of the probe that was erased and of one trained anew, intact and after each erasure."""
    import matplotlib.pyplot as plt

    states = {INTACT: "intact", LEACE: "LEACE", f"{RANDOM} 0": "random, same rank", INLP: "INLP"}
    with styled():
        figure, grid = plt.subplots(2, len(PLACES), figsize=(9.6, 4.6), sharex=True, sharey=True)
        for row, probe in zip(grid, (SAME, ANEW), strict=True):
            for axis, place in zip(row, PLACES, strict=True):
                for state, name in states.items():
                    own = [_record(metrics, place, part, probe, state)["layers"] for part in PARTS]
                    colour = COLOURS[RANDOM if state.startswith(RANDOM) else state]
                    for part, line in zip(PARTS, own, strict=True):
                        axis.plot(line, color=colour, lw=1.2, ls="-" if part == "V" else ":", label=f"{name}, {part}")
                axis.axhline(metrics["chance"], color="0.35", ls="--", lw=0.9)
                axis.set_ylim(0, 1)
                if probe == SAME:
                    axis.set_title(PLACE_NAMES[place])
                else:
                    axis.set_xlabel("layer")
            row[0].set_ylabel(f"{probe}\naccuracy per digit")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0.11, 1, 1))
    return figure


def accuracy(metrics: Mapping[str, Any], place: str, part: str, probe: str, state: str) -> Mapping[str, float]:
    """Digits that a probe reads, mean over layers, with its interval."""
    return _record(metrics, place, part, probe, state)["accuracy"]


def _record(metrics: Mapping[str, Any], place: str, part: str, probe: str, state: str) -> Mapping[str, Any]:
    wanted = {"place": place, "part": part, "probe": probe, "state": state}
    return next(each for each in metrics["probes"] if wanted.items() <= each.items())


def _points(axis: Any, values: list[Mapping[str, float]], rows: list[int | float], colour: str, label: str) -> None:
    estimates = [estimate_of(value) for value in values]
    for value, row in zip(estimates, rows, strict=True):
        axis.plot([value.low, value.high], [row, row], color=colour, lw=1.3)
    axis.plot([value.mean for value in estimates], rows, "o", ms=4.5, color=colour, label=label)
