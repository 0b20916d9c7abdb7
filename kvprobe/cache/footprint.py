"""Bytes that the live slots of a ledger take, where each head stores its own slots and each slot has its precision.

kvprobe itself holds every number in the model's dtype, in tensors of one length for all layers and heads, so that it
can be captured and patched. An engine that stores less is priced here from the ledger. A test packs quantised
slots into bytes, and holds their number equal to the one computed here.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.slots import Rounds


def footprint(ledger: Ledger, shape: tuple[int, int, int, int], number_bytes: int) -> int:
    """Bytes of K and V of all live slots.

    Args:
        shape: layers, KV heads, and numbers in a key and in a value.
        number_bytes: of a number at full precision.
    """
    layers, kv_heads, d_key, d_value = shape
    live = ledger.live.expand(layers, -1, kv_heads, -1)
    coarse = ledger.quantised >= 0
    fine_slots = int((live & ~coarse[None, :, None, :]).sum())
    total = fine_slots * (d_key + d_value) * number_bytes
    if ledger.quantisation is not None:
        price = Rounds(ledger.quantisation.bits, ledger.quantisation.group)
        coarse_slots = live & coarse[None, :, None, :]
        total += int(coarse_slots.sum()) * price.slot_bytes(d_key, d_value)
        total += _groups_held(coarse_slots, ledger.quantised) * price.group_bytes(d_key)
    return total


def _groups_held(live: Bool[Tensor, "layers batch kv_heads slots"], groups: Int[Tensor, "batch slots"]) -> int:
    """Groups of key slots that have a live slot left, over layers, rows and heads."""
    layers, batch, kv_heads, _ = live.shape
    if not bool(live.any()):
        return 0
    held = torch.zeros(layers, batch, kv_heads, int(groups.max()) + 1, dtype=torch.long, device=live.device)
    index = groups.clamp(min=0)[None, :, None, :].expand_as(live)
    held.scatter_add_(3, index, live.long())
    return int((held > 0).sum())
