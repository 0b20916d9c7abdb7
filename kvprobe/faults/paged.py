"""Faults of paged caches, whose unit is a block of consecutive slots."""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.faults.context import FaultContext
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck
from kvprobe.names import unknown

_BLOCK_LOTS = 41

Pointing = Literal["swapped", "repeated"]


@dataclass(frozen=True)
class Paged(Fault):
    """A fault that strikes whole blocks: the rate of its scope is a share of blocks.

    Attributes:
        block: slots in a block; engines use 16 as a rule.
    """

    block: int = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise UserError(f"{type(self).__name__} has block={self.block}; it must be at least 1.")
        object.__setattr__(self, "scope", replace(self.scope, block=self.block))


@dataclass(frozen=True)
class WrongPointers(Paged):
    """Entries of the block table that point at other blocks of the same request, in all layers: `swapped` among the struck
    blocks, or `repeated`, so that another block of the prompt is read twice and one's own never.

    Reads of wrong rows, because the kernel took another block size than the cache's: vllm PR #27547, where GSM8K fell from
    0.85 to 0.02. SGLang #17839, which began seed 001, was read as this; a later fix there blames a race on evicted
    sliding-window slots. Attention does not care for the order of slots, and a key carries its position with it, so swapping
    whole blocks that are all visible changes nothing; where K and V are swapped apart, or a window cuts the order, it does.
    The last block, if it is not full, is left alone.
    """

    pointing: Pointing = "swapped"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pointing not in get_args(Pointing):
            raise UserError(unknown("pointing", self.pointing, get_args(Pointing)))

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        before = struck.of(part)
        blocks = -(-struck.slots_in_row // self.block)
        lots = struck.draws.uniform((blocks,), _BLOCK_LOTS, struck.step).to(before.device)
        block, offset = struck.slots // self.block, struck.slots % self.block
        heads = struck.context.cache.n_kv_heads
        stream = struck.rows * heads + struck.heads
        whole = torch.bincount(stream * blocks + block, minlength=1)[stream * blocks + block] == self.block
        if self.pointing == "swapped":
            after = before.clone()
            among = whole.nonzero()[:, 0]
            group = stream * self.block + offset
            after[among] = before[among][following(group[among], lots[block[among]])]
            return after
        others = self._others(struck.context, blocks, lots)
        if others is None:
            return before
        clean = struck.context.cache
        vectors = (clean.keys if part == "k" else clean.values)[struck.layer][0]
        found = vectors[struck.heads, others[block] * self.block + offset]
        return torch.where(whole[:, None], found, before)

    def _others(
        self, context: FaultContext, blocks: int, lots: Float[Tensor, "blocks"]
    ) -> Int[Tensor, "blocks"] | None:
        """For each block another one, of those that the prompt fills; None if there is none."""
        held = ~context.cache.ledger.padding[0]
        full = held[: len(held) // self.block * self.block].view(-1, self.block).all(1)
        candidates = full.nonzero()[:, 0]
        if len(candidates) < 2:
            return None
        # Any but one's own: as many steps on as the lot says. A block that is no candidate may take any.
        place = torch.full((blocks,), -1, device=lots.device)
        place[candidates] = torch.arange(len(candidates), device=lots.device)
        choices = len(candidates) - (place >= 0).long()
        return candidates[(place + 1 + (lots * choices).long()) % len(candidates)]


def following(group: Int[Tensor, "entries"], lots: Float[Tensor, "entries"]) -> Int[Tensor, "entries"]:
    """For each entry the next one of its group in the order of lots, the last being followed by the first; so that every
    group of two or more is thoroughly permuted."""
    order = torch.argsort(lots)
    order = order[torch.argsort(group[order], stable=True)]
    ordered = group[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    index = torch.arange(len(order), device=order.device)
    first = torch.ones_like(last)
    first[1:] = last[:-1]
    start = torch.where(first, index, 0).cummax(0).values if len(index) else index
    after = torch.where(last, start, index + 1)
    found = torch.empty_like(order)
    found[order] = order[after]
    return found
