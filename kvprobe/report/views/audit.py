"""An audit as a page: the verdict, what each check found, and a map of layers and blocks."""

from pathlib import Path

import torch

from kvprobe.detection.audit import Audit
from kvprobe.detection.scores import BLOCK
from kvprobe.files import write_whole
from kvprobe.report.document import HeatMap
from kvprobe.report.views.page import render

MOST_COLUMNS, MOST_EXCESS = 64, 5.0


def save_audit(audit: Audit, path: str | Path) -> Path:
    """Write the page as one HTML file that needs no other."""
    return write_whole(path, audit_page(audit))


def audit_page(audit: Audit) -> str:
    """The page."""
    return render(
        "audit.html.j2",
        [_map(audit)],
        title=f"{audit.origin}, audited for {audit.model}",
        question="Is this cache what the model could have written, judged without a reference?",
        answer=audit.verdict,
        passages=[],
        audit=audit,
    )


def _map(audit: Audit) -> HeatMap:
    """The largest excess of each layer in each block, or in several where there are many."""
    blocks = audit.excess.shape[1]
    joined = -(-blocks // MOST_COLUMNS)
    columns = [audit.excess[:, first : first + joined].amax(1) for first in range(0, blocks, joined)]
    return HeatMap(
        caption="How unusual the most unusual place is, as a multiple of what is allowed: above 1 it is "
        "suspicious; 5 stands for more, too.",
        rows=[str(layer) for layer in range(len(audit.excess))],
        columns=[str(first * BLOCK) for first in range(0, blocks, joined)],
        values=[[min(MOST_EXCESS, round(number, 2)) for number in row] for row in torch.stack(columns, 1).tolist()],
        unit="of what is allowed",
        row_axis="layer",
        column_axis="slots from",
        scale=MOST_EXCESS,
    )
