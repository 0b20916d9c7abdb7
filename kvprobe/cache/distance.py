"""How far two caches of the same text are from each other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError

FAMILIES = ("k", "v")
"""The first axis of `relative_distance`: keys, then values."""


def relative_distance(
    cache: KVCache, reference: KVCache, segments: Sequence[str]
) -> Float[Tensor, "families layers segments"]:
    """‖difference‖ / ‖reference‖ of K and of V over the slots of each segment, of two caches of one row.

    Raises:
        UserError: keys were not computed at the same positions, or there is no such segment.
    """
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
