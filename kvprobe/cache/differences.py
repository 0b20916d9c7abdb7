"""Where two caches of the same slots or the same text differ, and by how much."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from kvprobe.cache.alike import refuse_other_model
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError

FAMILIES = ("k", "v")
"""The first axis of `relative_distance`: keys, then values."""


def changed_slots(before: KVCache, after: KVCache) -> Int[Tensor, "changed"]:
    """Slots that hold another token, or where all hold the same, other numbers in some layer and head.

    Raises:
        UserError: the caches do not have one row each and as many slots.
    """
    _refuse_others(before, after)
    differs = after.ledger.tokens[0] != before.ledger.tokens[0]
    if not bool(differs.any()):
        pairs = zip(after.tensors, before.tensors, strict=True)
        differs = torch.stack([(one != other)[0].any(-1).any(0) for one, other in pairs]).any(0)
    return differs.nonzero()[:, 0]


def vectors_apart(
    one: Num[Tensor, "heads slots numbers"],
    other: Num[Tensor, "heads slots numbers"],
    counted: Bool[Tensor, "_ slots"] | None = None,
) -> Float[Tensor, "heads slots"]:
    """‖one - other‖ / ‖other‖ of each vector, where a short vector counts as long as the median of its head: that of a
    slot which stores next to nothing of its text, as sinks do, has no precision of its own. Infinite where a number is
    not finite; 0 where a slot does not count, in a head or in all. A head at a time is in memory in fp32."""
    linear: Any = torch.linalg  # its annotations are incomplete
    norm: Callable[..., Tensor] = linear.vector_norm
    off: list[Tensor] = []
    for head in range(len(other)):
        held, true = one[head].float(), other[head].float()
        length = norm(true, dim=-1)
        some = torch.ones_like(length, dtype=torch.bool)
        if counted is not None:
            some = counted[head if len(counted) > 1 else 0].to(length.device)
        typical = length[some & length.isfinite()]
        least = typical.median() if len(typical) else length.new_ones(())
        distance = norm(held - true, dim=-1) / length.maximum(least).clamp(min=1e-30)
        off.append(distance.nan_to_num(torch.inf, torch.inf).masked_fill(~some, 0.0))
    return torch.stack(off).cpu()


def apart(one: KVCache, other: KVCache, slots: Sequence[int]) -> float:
    """The largest difference of any part in these slots, relative to the largest number of that part in the layer.

    Raises:
        UserError: as `changed_slots`.
    """
    _refuse_others(one, other)
    chosen = list(slots)
    return max(
        float((mine[:, :, chosen] - theirs[:, :, chosen]).abs().max() / mine.abs().max())
        for mine, theirs in zip(one.tensors, other.tensors, strict=True)
    )


def relative_distance(
    cache: KVCache, reference: KVCache, segments: Sequence[str]
) -> Float[Tensor, "families layers segments"]:
    """‖difference‖ / ‖reference‖ of K and of V over the slots of each segment, of two caches of one row.

    Raises:
        UserError: keys were not computed at the same positions, or there is no such segment.
    """
    refuse_other_model(reference, cache, "The other cache")
    if not torch.equal(cache.ledger.origins, reference.ledger.origins):
        raise UserError("Keys can be compared only where both caches computed them at the same positions.")
    places = [reference.ledger.in_segments([segment])[0] for segment in segments]

    linear: Any = torch.linalg  # its annotations are incomplete
    norm: Callable[[Tensor], Tensor] = linear.vector_norm

    def relative(one: Tensor, other: Tensor) -> Tensor:
        pairs = [(one[0][:, place].float(), other[0][:, place].float()) for place in places]
        return torch.stack([norm(mine - theirs) / norm(theirs) for mine, theirs in pairs])

    families = ((cache.keys, reference.keys), (cache.values, reference.values))
    return torch.stack([torch.stack([*map(relative, mine, theirs)]) for mine, theirs in families])


def _refuse_others(one: KVCache, other: KVCache) -> None:
    refuse_other_model(one, other, "The other cache")
    shapes = [(cache.batch, cache.slots) for cache in (one, other)]
    if shapes[0] != shapes[1] or shapes[0][0] != 1:
        raise UserError(
            f"The caches have (rows, slots) = {shapes[0]} and {shapes[1]}; compare two of one row and as many slots."
        )
