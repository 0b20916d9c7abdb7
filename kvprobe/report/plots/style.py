"""The house style: how every figure looks, and how it is saved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from kvprobe.arguments import checked_arguments
from kvprobe.files import replacing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Arguments = ParamSpec("Arguments")

ARM_COLOURS = {
    "hidden": "#7f7f7f",
    "direct": "#0072b2",
    "masked": "#d55e00",
    "restart": "#009e73",
    "before": "#cc79a7",
    "direct less restart": "#56b4e9",
    "masked less restart": "#e69f00",
}
"""Of conditions: colours that readers with any colour vision can distinguish (Okabe and Ito)."""


@contextmanager
def styled() -> Iterator[None]:
    """The style of kvprobe's figures, within a `with` block."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    import seaborn as sns

    settings: Any = {"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 8.5, "lines.linewidth": 1.5}
    with sns.axes_style("ticks"), plt.rc_context(settings):
        yield
        interactive = plt.isinteractive()
    # The first figure of a notebook loads its backend, which turns interactive mode on; without that mode, the figures
    # that a user draws afterwards would not be shown.
    mpl.interactive(interactive)


def shown_once(draw: "Callable[Arguments, Figure]") -> "Callable[Arguments, Figure]":
    """A function that draws, whose figure a notebook shows as the value of its cell and nowhere else.

    Of figures that pyplot holds open, the inline backend shows each after its cell, so this one would be seen twice.
    """

    @wraps(draw)
    def drawn(*args: Arguments.args, **named: Arguments.kwargs) -> "Figure":
        import matplotlib.pyplot as plt

        figure = draw(*args, **named)
        if "inline" in plt.get_backend():
            plt.close(figure)
        return figure

    return drawn


@checked_arguments
def save(figure: "Figure", path: Path) -> None:
    """Write `path`.png and `path`.svg without the date, so that the same numbers give the same files."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.despine(figure)
    kinds: dict[str, Any] = {"png": {"metadata": {"Software": None}, "dpi": 150}, "svg": {"metadata": {"Date": None}}}
    fixed: Any = {"svg.hashsalt": "kvprobe", "figure.autolayout": False, "figure.constrained_layout.use": False}
    with plt.rc_context(fixed):
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
        figure.set_layout_engine(None)  # else each file would be laid out again, and drawn twice
        for kind, how in kinds.items():
            with replacing(path.with_name(f"{path.name}.{kind}")) as partial:
                figure.savefig(partial, format=kind, **how)
    plt.close(figure)


def save_or_remove(figure: "Figure | None", path: Path) -> None:
    """`save`; or, where there is nothing to draw, remove what was drawn there before."""
    if figure is not None:
        save(figure, path)
        return
    for ending in ("png", "svg"):
        path.with_name(f"{path.name}.{ending}").unlink(missing_ok=True)


@checked_arguments
def heat(
    axis: "Axes",
    table: "pd.DataFrame",
    limit: int | float,
    label: str | None,
    around_zero: bool = True,
    upward: bool = False,
) -> None:
    """Draw a table of numbers as a heat map.

    Args:
        limit: the largest value of the colour scale.
        label: of the colour bar; None for no bar.
        around_zero: whether the scale is symmetric; otherwise it begins at zero.
        upward: whether the first row is at the bottom; see `kvprobe.report.orientation`.
    """
    import seaborn as sns

    sns.heatmap(
        table,
        ax=axis,
        cmap="RdBu" if around_zero else "Blues",
        vmin=-limit if around_zero else 0,
        vmax=limit,
        cbar=label is not None,
        cbar_kws={"label": label} if label is not None else None,
        rasterized=table.size > 2000,
    )
    axis.set_ylim((0, len(table)) if upward else (len(table), 0))
    axis.tick_params(length=2)
