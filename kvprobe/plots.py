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
}
"""Colours that readers with any colour vision can tell apart (Okabe and Ito)."""


@contextmanager
def styled() -> Iterator[None]:
    """The style of kvprobe's figures, for as long as this lasts."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    settings = {"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 8.5, "lines.linewidth": 1.5}
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
