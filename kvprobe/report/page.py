"""Pictures and marked text in pages, which hold all that they show."""

import base64
import re
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.report.document import Passage
from kvprobe.report.plots.figure import Figure

LARGEST_FIGURE = 2**25
"""Bytes."""


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


def pieces(passage: Passage) -> list[tuple[str, bool]]:
    """The text of a passage, cut wherever the marked text begins or ends, and which pieces are marked."""
    if not passage.marked:
        return [(passage.text, False)]
    texts = re.split(f"({re.escape(passage.marked)})", passage.text)
    return [(text, place % 2 == 1) for place, text in enumerate(texts)]
