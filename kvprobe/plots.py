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
