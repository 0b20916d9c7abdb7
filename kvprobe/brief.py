"""How results show themselves: one short line as text, and in a notebook a table below it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor

LONGEST = 900
"""Characters of a repr."""
MOST_ROWS = 20
"""Of a table in a notebook."""
MOST_ENTRIES = 4
"""Of a list that is written out."""

Table = tuple[Sequence[object], Iterable[Iterable[object]]]
"""The names of columns, and rows."""


class Brief:
    """An object whose repr is one short line. Tensors are shown by their shape, and long lists by their length.

    A subclass that is a dataclass is declared with `repr=False`. It may say in `_facts` what is most worth knowing, and
    in `_table` or `_html` what a notebook shows below that line.
    """

    def __repr__(self) -> str:
        return cut(f"{type(self).__name__}({', '.join(self._facts())})", LONGEST)

    def _repr_html_(self) -> str | None:
        below = self._html()
        return None if below is None else f"<div><code>{escape(repr(self))}</code>{below}</div>"

    def _facts(self) -> Iterable[str]:
        assert is_dataclass(self)
        return (f"{field.name}={brief(getattr(self, field.name))}" for field in fields(self) if field.repr)

    def _table(self) -> Table | None:
        """By default what `df` gives, where there is one."""
        df = getattr(self, "df", None)
        return None if df is None else frame_table(df())

    def _html(self) -> str | None:
        table = self._table()
        return None if table is None else table_html(*table)


def show_page(view: str, *results: object) -> None:
    """Show the page that this function of `kv.views` makes of some results. Its room is above those of all results, so
    it is found by name."""
    getattr(import_module("kvprobe.report.views"), view)(*results).show()


def brief(value: Any, limit: int = 200) -> str:
    """Any value in at most `limit` characters."""
    if hasattr(value, "columns") and hasattr(value, "shape"):
        rows, columns = value.shape
        return f"table of {rows} rows × {columns} columns"
    if hasattr(value, "dtype") and getattr(value, "shape", ()):
        return shape_of(value)
    if isinstance(value, Mapping):
        entries = cast(Mapping[object, object], value)
        if len(entries) > MOST_ENTRIES:
            return f"{{{len(entries)} entries}}"
        return cut(f"{{{', '.join(f'{brief(key, 60)}: {brief(entry)}' for key, entry in entries.items())}}}", limit)
    if isinstance(value, list | tuple):
        return cut(_listed(cast(Sequence[object], value)), limit)
    return cut(repr(value), limit)


def shape_of(tensor: "Tensor | np.ndarray") -> str:
    """Dtype and sizes of a tensor or array."""
    return f"{plain_dtype(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def plain_dtype(dtype: object) -> str:
    """The name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def cut(text: str, limit: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def frame_table(frame: "pd.DataFrame") -> Table:
    """A dataframe as a table; an index that has a name is its first column."""
    frame = frame if frame.index.name is None else frame.reset_index()
    return list(frame.columns), frame.itertuples(index=False)


def table_html(columns: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    """The first rows of a table as HTML, everything in it escaped."""
    rows = list(rows)
    head = "".join(f"<th>{escape(cut(str(column), 60))}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(entry))}</td>' for entry in row)}</tr>" for row in islice(rows, MOST_ROWS)
    )
    more = f"<p>{len(rows) - MOST_ROWS} more rows</p>" if len(rows) > MOST_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _listed(values: Sequence[object]) -> str:
    opening, closing = ("(", ",)" if len(values) == 1 else ")") if isinstance(values, tuple) else "[]"
    shown = ", ".join(brief(value, 80) for value in values[:MOST_ENTRIES])
    return f"{opening}{shown}{f', … {len(values)} in all' if len(values) > MOST_ENTRIES else ''}{closing}"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else cut(str(value), 60)
