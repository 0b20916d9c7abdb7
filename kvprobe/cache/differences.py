"""Where two caches of the same slots differ, and by how much."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError


def changed_slots(before: KVCache, after: KVCache) -> Int[Tensor, "changed"]:
    """Slots that hold another token, or where all hold the same, another K or V in some layer and head.

    Raises:
        UserError: the caches do not have one row each and as many slots.
    """
    _refuse_others(before, after)
    differs = after.ledger.tokens[0] != before.ledger.tokens[0]
    if not bool(differs.any()):
        pairs = zip((*after.keys, *after.values), (*before.keys, *before.values), strict=True)
        differs = torch.stack([(one != other)[0].any(-1).any(0) for one, other in pairs]).any(0)
    return differs.nonzero()[:, 0]


def apart(one: KVCache, other: KVCache, slots: Sequence[int]) -> float:
    """The largest difference of K or V in these slots, relative to the largest number of the layer's K or V.

    Raises:
        UserError: as `changed_slots`.
    """
    _refuse_others(one, other)
    chosen = list(slots)
    return max(
        float((mine[:, :, chosen] - theirs[:, :, chosen]).abs().max() / mine.abs().max())
        for mine, theirs in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    )


def _refuse_others(one: KVCache, other: KVCache) -> None:
    shapes = [(cache.batch, cache.slots) for cache in (one, other)]
    if shapes[0] != shapes[1] or shapes[0][0] != 1:
        raise UserError(
            f"The caches have (rows, slots) = {shapes[0]} and {shapes[1]}; compare two of one row and as many slots."
        )
