"""Bytes that the live slots of a ledger take, where each head stores its own slots and each slot has its precision.

kvprobe itself holds every number in the model's dtype, in tensors of one length for all layers and heads, so that it
can be captured and patched. An engine that stores less is priced here from the ledger. A test packs quantised
slots into bytes, and holds their number equal to the one computed here.
"""

from itertools import groupby

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import KV, Shape
from kvprobe.cache.slots import Rounds


def footprint(ledger: Ledger, shape: Shape, number_bytes: int) -> int:
    """Bytes of what all live slots store.

    Args:
        number_bytes: of a number at full precision.
    """
    coarse, total = (ledger.quantised >= 0)[:, None, :], 0
    lives = ledger.live.expand(len(shape), *ledger.live.shape[1:])
    for live, parts in zip(lives, shape, strict=True):
        for heads, alike in groupby(parts, lambda part: part.heads):
            fine = int((live.expand(-1, heads, -1) & ~coarse).sum())
            total += fine * sum(part.head_bytes(number_bytes) for part in alike)
        if ledger.quantisation is not None:
            price = Rounds(ledger.quantisation.bits, ledger.quantisation.group)
            live, numbers = live.expand(-1, parts[0].heads, -1), {part.name: part.numbers for part in parts}
            d_key, d_value = (numbers[name] for name in KV)
            total += int((live & coarse).sum()) * price.slot_bytes(d_key, d_value)
            total += _groups_held(live & coarse, ledger.quantised) * price.group_bytes(d_key)
    return total


def _groups_held(live: Bool[Tensor, "batch kv_heads slots"], groups: Int[Tensor, "batch slots"]) -> int:
    """Groups of key slots that have a live slot left, over rows and heads."""
    batch, kv_heads, _ = live.shape
    if not bool(live.any()):
        return 0
    held = torch.zeros(batch, kv_heads, int(groups.max()) + 1, dtype=torch.long, device=live.device)
    index = groups.clamp(min=0)[:, None, :].expand_as(live)
    held.scatter_add_(2, index, live.long())
    return int((held > 0).sum())
