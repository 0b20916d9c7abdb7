"""The plot of a patch sweep: what each cell moves, as heat maps."""

from functools import partial
from typing import TYPE_CHECKING

from kvprobe.arguments import checked_arguments
from kvprobe.report.orientation import is_upward
from kvprobe.report.plots.style import heat, shown_once, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvprobe.patching.maps import PatchMap

LETTER = 0.075
"""Inches that a letter of a label takes."""


@shown_once
@checked_arguments
def patching(patched: "PatchMap", rows: str, columns: str, value: str = "normalised") -> "Figure":
    """Heat maps of a `kvprobe.patch_sweep` result over two axes of its grid: one for each part (K, V), on one
    scale around zero."""
    import matplotlib.pyplot as plt
    import numpy as np

    parts = list(dict.fromkeys(cell.part for cell in patched.cells))
    tables = [
        patched.matrix(rows, columns, part, value=value)
        .rename(partial(_tick, rows))
        .rename(partial(_tick, columns), axis=1)
        for part in parts
    ]
    limit = float(np.nanmax(np.abs([table.to_numpy() for table in tables]))) or 1.0
    beside, below = (LETTER * max(map(len, names)) for names in (tables[0].index, tables[0].columns))
    height = min(9.0, 1.2 + below + 0.16 * len(tables[0]))
    width = min(7.0, 0.9 + 0.22 * len(tables[0].columns))
    size = (0.8 + beside + width * len(parts), height)
    with styled():
        figure, axes = plt.subplots(1, len(parts), figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axis, part, table in zip(axes[0], parts, tables, strict=True):
            heat(axis, table, limit, value if axis is axes[0, -1] else None, upward=is_upward(rows))
            axis.set(title=part, xlabel=columns, ylabel=rows if axis is axes[0, 0] else "")
    return figure


def _tick(axis: str, label: object) -> str:
    """A tick's label: L8 for a layer, H0 for a head; `$` begins no formula."""
    return {"layer": "L", "head": "H", "query_head": "H"}.get(axis, "") + str(label).replace("$", r"\$")
