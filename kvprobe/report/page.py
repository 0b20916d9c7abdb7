"""The report page of a run: one self-contained HTML file, everything escaped, nothing fetched."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvprobe.errors import UserError
from kvprobe.files import write_whole
from kvprobe.report.document import Figure, Passage, Report
from kvprobe.report.views.page import Part, render

LARGEST_FIGURE = 2**25
"""Bytes."""


def write_report(folder: Path, content: Mapping[str, Any]) -> Path:
    """Render a run's `report.html` from its report as data; nothing is computed again.

    Args:
        folder: of the run; its figures are in `figures/`.
        content: what `Report.to_dict` gave.

    Raises:
        UserError: `content` is not a report, or a figure is missing.
    """
    report = Report.from_dict(content)

    page = render(
        "report.html.j2",
        _parts(report),
        title=report.title,
        report=report,
        pieces=pieces,
        picture=partial(picture, folder / "figures"),
    )
    return write_whole(folder / "report.html", page)


def write_views(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write the maps, token views and attention of a run's report as `views.html`, a page of their own.

    Raises:
        UserError: `content` is not a report, or has no views.
    """
    report = Report.from_dict(content)
    parts = _parts(report)
    if not parts:
        raise UserError(f"The report of {folder} has no views; see its figures with `kvprobe report {folder}`.")
    return write_whole(folder / "views.html", render("page.html.j2", parts, title=report.title))


def picture(figures: Path, figure: Figure) -> str:
    """A figure as the source of an image.

    Raises:
        UserError: its file is not in this folder, or too large.
    """
    path = figures / f"{figure.file}.png"
    if path.resolve().parent != figures.resolve() or not path.is_file():
        raise UserError(
            f"The report names the figure {figure.file[:80]!r}, which is not a file in {figures}; run the study again."
        )
    if path.stat().st_size > LARGEST_FIGURE:
        raise UserError(f"{path} is larger than {LARGEST_FIGURE // 2**20} MiB; run the study again.")
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _parts(report: Report) -> list[Part]:
    return [part for section in report.sections for part in (*section.maps, *section.views, *section.heads)]


@dataclass(frozen=True)
class _Piece:
    text: str
    marked: bool


def pieces(passage: Passage) -> list[_Piece]:
    """The text of a passage, cut wherever the marked text begins or ends."""
    if not passage.marked:
        return [_Piece(passage.text, False)]
    pieces = []
    for index, text in enumerate(passage.text.split(passage.marked)):
        if index:
            pieces.append(_Piece(passage.marked, True))
        pieces.append(_Piece(text, False))
    return pieces
