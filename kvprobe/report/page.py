"""The report page of a run: one self-contained HTML file, everything escaped, nothing fetched."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvprobe.errors import UserError
from kvprobe.files import write_whole
from kvprobe.report.document import Figure, Passage, Report
from kvprobe.report.views.page import Part, render

MOST_BYTES = 2**25
"""Of a figure."""


@runtime_checkable
class Finished(Protocol):
    """A folder with figures, and the report on them as data; see `kvprobe.experiments.runs.Run`."""

    @property
    def path(self) -> Path: ...

    @property
    def report(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class _Piece:
    text: str
    marked: bool


def write_report(run: Finished) -> Path:
    """Render `report.html` from what the run holds on disk; nothing is computed again.

    Raises:
        UserError: the run is unfinished.
    """
    report = Report.from_dict(run.report)

    def picture(figure: Figure) -> str:
        return "data:image/png;base64," + base64.b64encode(_drawn(run, figure)).decode()

    page = render(
        "report.html.j2",
        _parts(report),
        title=report.title,
        report=report,
        pieces=_pieces,
        picture=picture,
        version=version("kvprobe"),
    )
    return write_whole(run.path / "report.html", page)


def write_views(run: Finished) -> Path:
    """Write the maps, token views and attention of a run's report as `views.html`, a page of their own.

    Raises:
        UserError: the run is unfinished, or its report has no views.
    """
    report = Report.from_dict(run.report)
    parts = _parts(report)
    if not parts:
        raise UserError(f"The report of {run.path} has no views; see its figures with `kvprobe report {run.path}`.")
    return write_whole(run.path / "views.html", render("page.html.j2", parts, title=report.title))


def _drawn(run: Finished, figure: Figure) -> bytes:
    """A figure's file, which must lie in the run."""
    folder = run.path / "figures"
    path = folder / f"{figure.file}.png"
    if path.resolve().parent != folder.resolve() or not path.is_file():
        raise UserError(
            f"The report names the figure {figure.file[:80]!r}, which is no file of {folder}; run the study again."
        )
    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path} is larger than {MOST_BYTES // 2**20} MiB; no figure of a report is.")
    return path.read_bytes()


def _parts(report: Report) -> list[Part]:
    return [part for section in report.sections for part in (*section.maps, *section.views, *section.heads)]


def _pieces(passage: Passage) -> list[_Piece]:
    """The text of a passage, split at what is to be marked."""
    if not passage.marked:
        return [_Piece(passage.text, False)]
    pieces = []
    for index, text in enumerate(passage.text.split(passage.marked)):
        if index:
            pieces.append(_Piece(passage.marked, True))
        pieces.append(_Piece(text, False))
    return pieces
