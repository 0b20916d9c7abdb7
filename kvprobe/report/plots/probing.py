"""The plot of a probing result: accuracy layer by layer."""

from typing import TYPE_CHECKING, Any

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError
from kvprobe.report.plots.style import shown_once, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.probing.claims import Probing


@shown_once
@checked_arguments
def leak(probing: "Probing") -> "Figure":
    """Accuracy by layer of a `kvprobe.probe` result: families side by side, one line per split and KV head, with
    intervals, and dotted its restart floor, where there is one.

    Raises:
        UserError: no site was read layer by layer.
    """
    import matplotlib.pyplot as plt
    import pandas as pd

    table = probing.df().query("read in ('mean', 'slot')")
    if table.empty:
        raise UserError("Nothing was read layer by layer, so there is no curve over layers; look at the table, `df()`.")
    families = list(table.groupby("family", sort=False))
    with styled():
        figure, axes = plt.subplots(
            1, len(families), figsize=(3.2 * len(families) + 1.8, 2.8), sharey=True, squeeze=False
        )
        for axis, (family, rows) in zip(axes[0], families, strict=True):
            curves: Any = rows.groupby(["split", "head"], sort=False, dropna=False)
            for (split, head), line in curves:
                label = split if pd.isna(head) else f"{split}, KV head {int(head)}"
                drawn = axis.plot(line["layer"], line["accuracy"], label=label)[0]
                axis.fill_between(line["layer"], line["low"], line["high"], color=drawn.get_color(), alpha=0.18, lw=0)
                if "floor" in line and line["floor"].notna().any():
                    axis.plot(line["layer"], line["floor"], color=drawn.get_color(), ls=":", label=f"{label}: restart")
            axis.axhline(probing.chance, color="0.35", ls="--", lw=0.9, label="chance")
            axis.set_title(str(family))
            axis.set_xlabel("layer")
            axis.set_ylim(0, None)
        axes[0, 0].set_ylabel("accuracy")
        axes[0, -1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.tight_layout()
    return figure
