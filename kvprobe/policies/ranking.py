"""The order of slots, by age and by score."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def age(live: Bool[Tensor, "*axes slots"]) -> Int[Tensor, "*axes slots"]:
    """The number of live slots after each slot."""
    return live.flip(-1).long().cumsum(-1).flip(-1) - live.long()


def rank(live: Bool[Tensor, "*axes slots"]) -> Int[Tensor, "*axes slots"]:
    """The number of live slots before each slot."""
    return live.long().cumsum(-1) - live.long()


def highest(
    scores: Float[Tensor, "layers batch kv_heads slots"],
    live: Bool[Tensor, "layers batch kv_heads slots"],
    count: int | Int[Tensor, "layers batch kv_heads"],
) -> Bool[Tensor, "layers batch kv_heads slots"]:
    """The `count` live slots of highest score in each layer, row and head; of equal scores, the newer slot."""
    ranked = scores.masked_fill(~live, -torch.inf)
    newest_first = ranked.flip(3).argsort(dim=3, descending=True, stable=True)
    order = ranked.shape[3] - 1 - newest_first
    places = torch.arange(order.shape[3], device=order.device).expand_as(order)
    place_of_slot = torch.empty_like(order).scatter_(3, order, places)
    limit = count if isinstance(count, int) else count[..., None]
    return live & (place_of_slot < limit)
