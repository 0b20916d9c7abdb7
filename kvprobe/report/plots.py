"""How every figure looks, and how it is saved."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from kvprobe.memory.budget import Budget
from kvprobe.memory.table import ENGINES
from kvprobe.memory.units import short

ARM_COLOURS = {
    "hidden": "#7f7f7f",
    "direct": "#0072b2",
    "masked": "#d55e00",
    "restart": "#009e73",
    "before": "#cc79a7",
    "direct less restart": "#56b4e9",
    "masked less restart": "#e69f00",
}
"""Colours that readers with any colour vision can tell apart (Okabe and Ito)."""


@contextmanager
def styled() -> Iterator[None]:
    """The style of kvprobe's figures, for as long as this lasts."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    settings: Any = {"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 8.5, "lines.linewidth": 1.5}
    with sns.axes_style("ticks"), plt.rc_context({**settings, "svg.hashsalt": "kvprobe"}):
        yield


def save(figure: Any, path: Path) -> None:
    """Write `path`.png and `path`.svg without the date, so that the same numbers give the same files."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.despine(figure)
    figure.savefig(path.with_suffix(".png"), dpi=150, metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


MEMORY_COLOURS = {
    "weights": "#7f7f7f",
    "activations and logits": "#e69f00",
    "prompt": "#0072b2",
    "generated": "#56b4e9",
    "headroom": "#009e73",
}
"""Of the parts of a memory budget, in the order in which they are stacked."""


def memory(
    budget: Budget, along: Literal["context", "new"] = "context", measured: Sequence[tuple[int, int]] = ()
) -> Any:
    """Where memory goes as the prompt gets longer (`context`) or as the model generates after it (`new`): weights, cache of
    prompt and generated tokens, what passes need beside them, and headroom, with the point where it runs out.

    Args:
        measured: tokens and bytes of peaks that were measured, drawn as dots.
    """
    import matplotlib.pyplot as plt
    import numpy as np

    largest = budget.largest_context if along == "context" else budget.largest_new
    seen = max((tokens for tokens, _ in measured), default=0)
    here = budget.request.context if along == "context" else max(budget.request.new, 64)
    far = max(seen, int(1.3 * largest) if largest else 2 * here)
    low = budget.request.new + 1 if along == "context" else 0
    places = np.unique(np.linspace(low, max(far, low + 1), 161).astype(int))
    points = [budget.at(int(place)) if along == "context" else budget.generating(int(place)) for place in places]
    parts = [_parts(point, along == "new") for point in points]
    bands = {name: np.array([each[name] for each in parts]) / 1e9 for name in MEMORY_COLOURS}
    with styled():
        figure, axis = plt.subplots(figsize=(5.6, 3.3), layout="constrained")
        shown = {name: band for name, band in bands.items() if band.any()}
        axis.stackplot(
            places, *shown.values(), labels=list(shown), colors=[MEMORY_COLOURS[name] for name in shown],
            alpha=0.85, lw=0,
        )  # fmt: skip
        if measured:
            axis.plot(*zip(*((x, y / 1e9) for x, y in measured), strict=True), "k.", ms=6, label="measured peak")
        if budget.usable is not None:
            axis.axhline(budget.usable / 1e9, color="0.2", lw=1, ls="--")
            axis.annotate(
                f"memory, {short(budget.usable)}", (places[0], budget.usable / 1e9), (4, 3),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
            if largest:
                axis.axvline(largest, color="#d55e00", lw=1.2)
                axis.annotate(
                    f"out of memory\nafter {largest:,} tokens", (largest, 0.04), (-4, 0), xycoords=("data", "axes fraction"),
                    textcoords="offset points", ha="right", fontsize=8, color="#d55e00",
                )  # fmt: skip
        what = (
            "tokens of context"
            if along == "context"
            else f"tokens generated after a prompt of {budget.request.prompt:,}"
        )
        axis.set(xlabel=what, ylabel="GB (10⁹ bytes)", xlim=(places[0], places[-1]), ylim=(0, None))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(
            f"{budget.config.name}, {budget.request.batch:,} at once, {budget.request.numbers.name}, {ENGINES[budget.engine]}"
        )
        handles, labels = axis.get_legend_handles_labels()
        beside: Any = "outside center right"  # which matplotlib's types do not know
        figure.legend(handles[::-1], labels[::-1], frameon=False, loc=beside)
    return figure


def _parts(point: Budget, now: bool) -> dict[str, int]:
    """The bytes of a budget by name, as they are stacked: at its peak, or `now`, when the last token is read."""
    moment = point.moments.get("generating" if now else point.moment, point.moments[point.moment])
    generated = min(sum(point.generated), moment.cache)
    passing = moment.activations + moment.logits + moment.growth
    found = {"weights": point.weights, "activations and logits": passing, "prompt": moment.cache - generated}
    left = 0 if point.usable is None else max(0, point.usable - point.weights - moment.total)
    return {**found, "generated": generated, "headroom": left}


def leak(probing: Any) -> Any:
    """Accuracy by layer of a `kvprobe.probe` result: families side by side, one line per split, with intervals."""
    import matplotlib.pyplot as plt

    table = probing.df()
    table = table[table["read"] == "mean"]
    families = list(table["family"].unique())
    with styled():
        figure, axes = plt.subplots(1, len(families), figsize=(3.2 * len(families), 2.8), sharey=True, squeeze=False)
        for axis, family in zip(axes[0], families, strict=True):
            for split, line in table[table["family"] == family].groupby("split", sort=False):
                drawn = axis.plot(line["layer"], line["accuracy"], label=split)[0]
                axis.fill_between(line["layer"], line["low"], line["high"], color=drawn.get_color(), alpha=0.18, lw=0)
            axis.axhline(probing.chance, color="0.35", ls="--", lw=0.9, label="chance")
            axis.set_title(family)
            axis.set_xlabel("layer")
            axis.set_ylim(0, None)
        axes[0, 0].set_ylabel("accuracy")
        axes[0, -1].legend(frameon=False)
        figure.tight_layout()
    return figure


def patching(found: Any, rows: str, columns: str, value: str = "normalised") -> Any:
    """Heat maps of a `kvprobe.patch_sweep` result over two axes of its grid: one for each part, on one scale around zero."""
    import matplotlib.pyplot as plt
    import numpy as np

    parts = list(dict.fromkeys(cell.part for cell in found.cells))
    tables = [found.matrix(rows, columns, part, value=value) for part in parts]
    limit = float(np.nanmax(np.abs([table.to_numpy() for table in tables]))) or 1.0
    height = min(9.0, 1.2 + 0.16 * len(tables[0]))
    width = min(7.0, 1.4 + 0.22 * len(tables[0].columns))
    with styled():
        figure, axes = plt.subplots(
            1, len(parts), figsize=(width * len(parts), height), sharey=True, squeeze=False, layout="constrained"
        )
        for axis, part, table in zip(axes[0], parts, tables, strict=True):
            heat(axis, table, limit, f"{value}" if axis is axes[0, -1] else None)
            axis.set(title=part, xlabel=columns, ylabel=rows if axis is axes[0, 0] else "")
    return figure


def heat(axis: Any, table: Any, limit: int | float, label: str | None) -> None:
    """A heat map of a table of numbers around zero, first row on top; `label` is that of its colour bar, None for no bar."""
    import seaborn as sns

    sns.heatmap(
        table,
        ax=axis,
        cmap="RdBu",
        vmin=-limit,
        vmax=limit,
        cbar=label is not None,
        cbar_kws={"label": label} if label is not None else None,
        rasterized=table.size > 2000,
    )
    axis.tick_params(length=2)
