"""The plot of any table with a row per layer and head: a heat map."""

from typing import TYPE_CHECKING

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError
from kvprobe.names import unknown
from kvprobe.report.plots.style import heat, shown_once, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@shown_once
@checked_arguments
def by_head(table: "pd.DataFrame", value: str, label: str | None = None) -> "Figure":
    """A heat map of one column of a table with one row per `layer` and `head`, such as `kvprobe.attention.dangling`
    gives.

    Args:
        label: of the colour bar; the column's name by default.

    Raises:
        UserError: the table has no such column, or several rows for a layer and head.
    """
    import matplotlib.pyplot as plt

    for name in ("layer", "head", value):
        if name not in table:
            raise UserError(unknown("column", name, list(table.columns)))
    if bool(table.duplicated(["layer", "head"]).any()):
        raise UserError("The table has several rows for a layer and head; choose one of them, or take their mean.")
    wide = table.pivot(index="head", columns="layer", values=value)
    limit = float(wide.abs().max().max()) or 1.0
    with styled():
        size = (2.2 + 0.2 * len(wide.columns), 1.2 + 0.16 * len(wide))
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        heat(axis, wide, limit, label or value, around_zero=bool((wide.min() < 0).any()))
    return figure
