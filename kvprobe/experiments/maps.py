"""Tables of numbers as maps of a report, which every study makes in the same way."""

import pandas as pd

from kvprobe.report.document import HeatMap


def map_of(table: pd.DataFrame, caption: str, unit: str) -> HeatMap:
    """A table as a map, with the names of its index and columns as axes; a missing number is a missing cell."""
    return HeatMap(
        caption=caption,
        rows=[str(row) for row in table.index],
        columns=[str(column) for column in table.columns],
        values=[[None if pd.isna(value) else float(value) for value in row] for row in table.to_numpy()],
        unit=unit,
        row_axis=str(table.index.name),
        column_axis=str(table.columns.name),
    )
