"""A certificate as a page: what was found, and a map of what depends on the secret."""

from pathlib import Path

import torch

from kvprobe.files import write_whole
from kvprobe.forgetting.certificate import Certificate
from kvprobe.report.document import HeatMap
from kvprobe.report.views.page import render

MOST_COLUMNS = 96


def save_certificate(certificate: Certificate, path: str | Path) -> Path:
    """Write the page as one HTML file that needs no other."""
    return write_whole(path, certificate_page(certificate))


def certificate_page(certificate: Certificate) -> str:
    """The page."""
    return render(
        "certificate.html.j2",
        [] if certificate.clean else [_map(certificate), _heads(certificate)],
        title=f"What “{certificate.way}” leaves of {', '.join(certificate.hidden)}",
        question=f"{certificate.model} read the conversation with {certificate.secrets} secrets in turn, and each was "
        "forgotten in the same way. What of it is left in the cache?",
        answer=certificate.answer,
        passages=[],
        certificate=certificate,
    )


def _map(certificate: Certificate) -> HeatMap:
    """The largest difference of each layer at each slot, or over several where there are many."""
    trace = certificate.trace
    by_slot, positions = trace.by_slot(), trace.positions or (0,)
    joined = -(-len(positions) // MOST_COLUMNS)
    columns = [by_slot[:, first : first + joined].amax(1) for first in range(0, by_slot.shape[1], joined)]
    values = torch.stack(columns, 1) if columns else torch.zeros(len(trace.layers), 1)
    return HeatMap(
        caption="How much what is stored depends on the secret: its standard deviation over secrets, relative to its "
        "size, in the part and head where that is largest.",
        rows=[str(layer) for layer in range(len(trace.layers))],
        columns=[str(position) for position in positions[::joined]],
        values=values.tolist(),
        unit="of its size",
        row_axis="layer",
        column_axis="position",
    )


def _heads(certificate: Certificate) -> HeatMap:
    """The largest difference of each layer in each head."""
    values = certificate.trace.by_head()
    return HeatMap(
        caption="The same by head of K and V, in the part and slot where it is largest. A latent, a state and a "
        "convolution's inputs count as they are stored.",
        rows=[str(layer) for layer in range(len(values))],
        columns=[str(head) for head in range(values.shape[1])],
        values=[[None if value != value else value for value in row] for row in values.tolist()],
        unit="of its size",
        row_axis="layer",
        column_axis="head",
    )
