"""Pictures and marked text in pages, which hold all that they show."""

import base64
from dataclasses import dataclass
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.report.document import FigureFile, Passage

LARGEST_FIGURE = 2**25
"""Bytes."""


def picture(figures: Path, figure: FigureFile) -> str:
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
