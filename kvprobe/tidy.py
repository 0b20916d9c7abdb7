"""Tidy tables, one row per observation: chosen by the values of columns, grouped, set beside each other, and made."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped

from kvprobe.errors import UserError

Key = str | int | float
Rows = Any
"""A table; pandas says too little of what selecting from one gives."""
Where = Mapping[str, Key | tuple[Key, ...]]
"""Values of columns that rows must have; one of several, where a tuple is given."""


def crossed(keys: Mapping[str, Sequence[Any]], columns: Mapping[str, Any]) -> pd.DataFrame:
    """A row for each combination of the keys' values, the last key's changing fastest; columns are arrays of as many
    numbers, of any shape."""
    index = pd.MultiIndex.from_product(list(keys.values()), names=list(keys))
    return pd.DataFrame({name: np.ravel(values) for name, values in columns.items()}, index).reset_index()


def beside(rows: Rows, of: str, where: Where, on: tuple[str, ...]) -> Any:
    """A column for all rows: the mean of `of` in the rows of one condition that agree with a row on the columns `on`.

    Taking a column away from it pairs every row with that condition: a `Mean` is then a paired difference.
    """
    means = chosen(rows, where).groupby(list(on))[of].mean().rename("beside")
    return rows[list(on)].join(means, on=list(on))["beside"]


def chosen(rows: Rows, where: Where, columns: Sequence[str] | None = None) -> Rows:
    """The rows that have these values; with all columns, or these."""
    having = [
        rows[column].isin(value) if isinstance(value, tuple) else rows[column] == value
        for column, value in where.items()
    ]
    rows = rows if columns is None else rows[list(dict.fromkeys(columns))]
    return rows[reduce(and_, having)] if having else rows  # one copy


def groups(rows: Rows, by: tuple[str, ...], where: Where) -> list[tuple[dict[str, Key], Rows]]:
    """The chosen rows for each combination of values of some columns, in the order in which they come.

    Raises:
        UserError: a column holds True and False, which are no keys of findings, or some rows lack it.
    """
    rows = chosen(rows, where)
    if not by:
        return [({}, rows)] if len(rows) else []
    _refuse_keyless(rows, by)
    return [(_plain(by, values), group) for values, group in rows.groupby(list(by), sort=False)]


def _refuse_keyless(rows: Rows, by: tuple[str, ...]) -> None:
    """See `groups`."""
    for column in by:
        if rows[column].dtype == bool:
            raise UserError(f"Findings are by {column!r}, a column of True and False; make it one of words.")
        if lacking := int(rows[column].isna().sum()):
            raise UserError(
                f"Findings are by {column!r}, which {lacking} of {len(rows)} rows lack; fill it in, or leave them out."
            )


def cluster_means(
    rows: Rows, by: tuple[str, ...], of: str, cluster: str, clusters: Shaped[np.ndarray, "clusters"]
) -> list[tuple[dict[str, Key], Float[np.ndarray, "clusters"]]]:
    """For each combination of values of some columns, as `groups` has them, the mean of the column `of` in each of
    these clusters, which are sorted; NaN for one without a finite value.

    Raises:
        UserError: see `groups`.
    """
    if not len(rows):
        return []
    _refuse_keyless(rows, by)
    grouped = np.zeros(len(rows), int)
    for column in by:  # as groupby numbers them, several times faster
        codes, levels = pd.factorize(rows[column])
        grouped = pd.factorize(grouped * len(levels) + codes)[0]
    first = np.unique(grouped, return_index=True)[1]
    values = rows[of].to_numpy(float)
    known = np.isfinite(values)
    codes, levels = pd.factorize(rows[cluster], use_na_sentinel=False)  # texts are slow to search for
    places = (grouped * len(clusters) + np.searchsorted(clusters, np.asarray(levels))[codes])[known]
    cells = len(first) * len(clusters)
    sums, sizes = np.bincount(places, values[known], cells), np.bincount(places, minlength=cells)
    means = np.divide(sums, sizes, out=np.full(cells, np.nan), where=sizes > 0).reshape(len(first), -1)
    keys = zip(*(rows[column].to_numpy()[first] for column in by), strict=True) if by else [()]
    return [(_plain(by, values), of_group) for values, of_group in zip(keys, means, strict=True)]


def _plain(by: tuple[str, ...], values: Iterable[Any]) -> dict[str, Key]:
    """Keys without numpy's types."""
    return {
        key: value.item() if isinstance(value, np.generic) else value for key, value in zip(by, values, strict=True)
    }
