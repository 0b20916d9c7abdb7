"""A difference between two caches as a page: the verdict, the causes, and maps of layers and blocks."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.detection.diff import CacheDifference
from kvprobe.files import write_whole
from kvprobe.report.document import HeatMap
from kvprobe.report.views.page import render

MOST_COLUMNS, MOST_EXCESS = 64, 5.0


def save_diff(difference: CacheDifference, path: str | Path) -> Path:
    """Write the page as one HTML file that needs no other."""
    return write_whole(path, diff_page(difference))


def diff_page(difference: CacheDifference) -> str:
    """The page."""
    return render(
        "diff.html.j2",
        [
            _map(
                difference,
                difference.excess,
                MOST_EXCESS,
                "of what is allowed",
                "The most that a slot is off, as a multiple of what is allowed there: above 1 it is no numerics; "
                "5 stands for more, too.",
            ),
            _map(
                difference,
                difference.distances,
                1.0,
                "of its size",
                "The most that a slot is off, relative to the size of what it should hold; 1 stands for more, too.",
            ),
        ],
        title=f"{difference.names[0]}, against {difference.names[1]}",
        question="Do these two caches differ by more than numerics, where, and what happened?",
        answer=difference.verdict,
        passages=[],
        difference=difference,
    )


def _map(
    difference: CacheDifference, numbers: Float[Tensor, "layers blocks"], most: float, unit: str, caption: str
) -> HeatMap:
    """The largest number of each layer in each block, or in several where there are many."""
    blocks = numbers.shape[1]
    joined = -(-blocks // MOST_COLUMNS)
    columns = [numbers[:, first : first + joined].amax(1) for first in range(0, blocks, joined)]
    return HeatMap(
        caption=caption,
        rows=[str(layer) for layer in range(len(numbers))],
        columns=[str(first * difference.block) for first in range(0, blocks, joined)],
        values=[[min(most, float(f"{number:.3g}")) for number in row] for row in torch.stack(columns, 1).tolist()],
        unit=unit,
        row_axis="layer",
        column_axis="slots from",
        scale=most,
    )
