"""Which tokens of a model have a content of the first layer: there it is a function of the token, and nothing else."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.detection.columns import computable, lone_columns
from kvprobe.detection.damaged import LookUp
from kvprobe.inference.model import Model
from kvprobe.models.geometry import embedded_tokens

_AT_ONCE = 4096


def look_up(model: Model) -> LookUp | None:
    """Finds the nearest of all tokens; None where a model's columns cannot be computed one by one."""
    if not computable(model.lanes):
        return None

    def nearest(part: str, rows: Float[Tensor, "some numbers"]) -> tuple[Int[Tensor, "some"], Float[Tensor, "some"]]:
        place = list(model.geometry.parts[0]).index(part)
        best, off = torch.zeros(len(rows), dtype=torch.long), torch.full((len(rows),), torch.inf)
        for tokens in torch.arange(embedded_tokens(model.lanes.plain)).split(_AT_ONCE):
            tokens = tokens.to(model.lanes.device)
            columns = lone_columns(model.lanes, tokens, torch.zeros_like(tokens), 1)[0][place]
            distances, which = torch.cdist(rows, columns.transpose(0, 1).flatten(1).cpu()).min(1)
            nearer = distances < off
            best, off = torch.where(nearer, tokens.cpu()[which], best), torch.where(nearer, distances, off)
        return best, off

    return nearest
