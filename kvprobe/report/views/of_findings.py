"""Findings as interactive views: as maps over two keys, and as a text with coloured tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.plain_data import filled
from kvprobe.report.document import LIMITS, HeatMap, TokenView
from kvprobe.report.findings import Findings
from kvprobe.report.plots.figure import Labels


def maps_of(
    findings: Findings,
    labels: Labels,
    name: str,
    rows: str,
    columns: str,
    caption: str,
    unit: str,
    where: Mapping[str, Any] | None = None,
    panel: str = "",
) -> list[HeatMap]:
    """Findings of a name as a map, or as several that share rows, columns and scale.

    Args:
        labels: how the value of a key is written.
        rows, columns: keys.
        where: the other keys; one of several values, where a list is given.
        panel: the key with a map for each of its values.
    """
    keys: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (where or {}).items()
    }
    down, across = (findings.values(name, key, **keys) for key in (rows, columns))
    panels = [{panel: value} for value in findings.values(name, panel, **keys)] if panel else [{}]

    def mean(**place: Any) -> float | None:
        estimate = findings.get(name, **keys | place)
        return None if estimate is None or estimate.unknown else estimate.mean

    values = [
        [[mean(**shown, **{rows: row, columns: column}) for column in across] for row in down] for shown in panels
    ]
    largest = max((abs(cell) for cells in values for row in cells for cell in row if cell is not None), default=0)
    return [
        HeatMap(
            caption=f"{labels(panel, shown[panel])}: {caption}" if panel else caption,
            rows=[labels(rows, row) for row in down],
            columns=[labels(columns, column) for column in across],
            values=cells,
            unit=unit,
            row_axis=rows,
            column_axis=columns,
            scale=largest if len(panels) > 1 else None,
        )
        for shown, cells in zip(panels, values, strict=True)
    ]


def tokens_of(
    findings: Findings,
    labels: Labels,
    name: str,
    along: str,
    texts: Sequence[str],
    caption: str,
    label: str = "",
    kinds: str | None = None,
) -> TokenView:
    """Findings of a name as a text with coloured tokens; 0 where there is no finding.

    Args:
        labels: how the value of a key is written.
        along: the key that has a value for each token.
        texts: of the tokens.
        label: of the numbers, where there is one kind of them.
        kinds: the key whose values the reader picks from, where there are several.
    """
    chosen = [{kinds: kind} for kind in findings.values(name, kinds)] if kinds else [{}]
    places = findings.values(name, along)
    estimates = [[findings.get(name, **kind, **{along: place}) for place in places] for kind in chosen]
    values = [[0.0 if estimate is None else estimate.mean for estimate in row] for row in estimates]
    named = [labels(kinds, kind[kinds]) if kinds else label for kind in chosen]
    return TokenView(caption, filled(Sequence[str], texts, "the tokens", LIMITS), named, values)
