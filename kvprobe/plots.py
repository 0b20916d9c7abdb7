"""How every figure looks, and how it is saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
