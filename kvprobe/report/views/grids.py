"""Maps and token views: values on a grid or on the tokens of a text, as markup with its data in it."""

import math
import re
from collections.abc import Mapping, Sequence

from kvprobe.errors import UserError
from kvprobe.report.document import HeatMap, TokenView
from kvprobe.report.orientation import is_upward
from kvprobe.report.views.component import component, figure

MOST_CELLS, MOST_IN_A_LINE = 100_000, 4_096
"""The most that a browser draws at once: cells of a map or values of a token view; rows, columns or tokens."""


def heat_map(data: HeatMap) -> str:
    """A map that names the cell under the mouse or the arrow keys: blue above zero, red below, grey for no value.

    Raises:
        UserError: the map is empty, too large, or not a full grid of finite values.
    """
    _check_grid("map", data.values, {"rows": len(data.rows), "columns": len(data.columns)})
    largest = max((abs(value) for row in data.values for value in row if value is not None), default=0)
    if data.scale is not None and not largest <= data.scale < math.inf:
        raise UserError(
            f"The map has a value of {largest:.4g}, beyond its scale of {data.scale:.4g}; give a larger one."
        )
    props = {
        "rows": list(data.rows),
        "columns": list(data.columns),
        "values": [[value if value is None else _rounded(value) for value in row] for row in data.values],
        "unit": data.unit,
        "rowAxis": data.row_axis,
        "columnAxis": data.column_axis,
        "upward": is_upward(data.row_axis),
        "scale": data.scale and _rounded(data.scale),
    }
    return figure(data.caption, component("HeatMap", props, _largest(data)))


def token_view(data: TokenView) -> str:
    """CircuitsVis' `ColoredTokensMulti`: blue above zero, red below, every label on one scale.

    Raises:
        UserError: the view is empty, too large, or has not one finite value for each token.
    """
    _check_grid("token view", data.values, {"labels": len(data.labels), "tokens": len(data.tokens)})
    layers = [[_rounded(value) for value in layer] for layer in data.values]
    # The component treats a bound below 1e-6 as zero and divides by it.
    bound = max(1e-6, *(abs(value) for layer in layers for value in layer))
    props = {
        "tokens": [_inert(token) for token in data.tokens],
        "values": [list(values) for values in zip(*layers, strict=True)],
        "labels": list(data.labels),
        "positiveBounds": [bound] * len(layers),
        "negativeBounds": [-bound] * len(layers),
    }
    return figure(data.caption, component("ColoredTokensMulti", props, "".join(data.tokens)))


def _inert(token: str) -> str:
    # The component writes a token as markup in the text and as plain text in the tip, so escaping is wrong in one of
    # them. A word joiner after `<` or `&` keeps both from starting a tag or a reference, and is invisible in both
    # (HTML standard, "tag open state" and "character reference state").
    return re.sub("[<&]", "\\g<0>\u2060", token).replace("\t", "⇥").replace("\n", "↵\n")


def _largest(data: HeatMap) -> str:
    """The three cells furthest from zero, in words."""
    cells = [
        (abs(value), f"{data.row_axis} {row}, {data.column_axis} {column}: {value:+.4g} {data.unit}".strip())
        for row, values in zip(data.rows, data.values, strict=True)
        for column, value in zip(data.columns, values, strict=True)
        if value is not None
    ]
    largest = sorted(cells, key=lambda cell: -cell[0])[:3]
    return f"Largest of {len(cells):,} cells: {'; '.join(text for _, text in largest)}."


def _check_grid(kind: str, values: Sequence[Sequence[int | float | None]], sides: Mapping[str, int]) -> None:
    (down, height), (across, width) = sides.items()
    if len(values) != height or any(len(line) != width for line in values):
        raise UserError(f"The {kind} has {height} {down} and {width} {across}; give values as [{down}][{across}].")
    if not height * width:
        raise UserError(f"The {kind} has {height} {down} and {width} {across}; give it at least one of each.")
    if max(height, width) > MOST_IN_A_LINE or height * width > MOST_CELLS:
        raise UserError(
            f"The {kind} has {height} {down} × {width} {across}; a browser draws at most {MOST_IN_A_LINE:,} of either "
            f"and {MOST_CELLS:,} values, so give a part of them, or averages."
        )
    if any(value is not None and not math.isfinite(value) for line in values for value in line):
        raise UserError(
            f"The {kind} has a value that is not finite; give None in a map, and leave the token out of a token view."
        )


def _rounded(value: int | float) -> float:
    """To four significant digits, so that a map of 18,000 cells takes about 130 KB."""
    return float(f"{value:.4g}")
