"""Faults of paged caches, whose unit is a block of consecutive slots."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import AtLeastOne
from kvprobe.faults.context import FaultContext, of_layer
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck

_BLOCKS = 41

Pointing = Literal["swapped", "repeated"]


@dataclass(frozen=True)
class Paged(Fault):
    """A fault that strikes whole blocks: the rate of its scope is a share of blocks.

    Attributes:
        block: slots in a block; most engines use 16.
    """

    block: AtLeastOne = field(default=16, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scope", replace(self.scope, block=self.block))


@dataclass(frozen=True)
class WrongPointers(Paged):
    """Entries of the block table that point at other blocks of the same request, in all layers.

    With `pointing="swapped"` the struck blocks exchange their entries. With `"repeated"` another block of the prompt is
    read twice, and the struck block is not read.

    Sources: vllm PR #27547, where the kernel took another block size than the cache's, read wrong rows, and GSM8K fell
    from 0.85 to 0.02. SGLang #17839, the issue behind "KV Cache is More Robust Than You Think in Large Language Models"
    (canarypwn), was explained in this way; a later fix there blames a race on evicted sliding-window slots.

    Attention is a sum over slots, and a key carries its position, so swapping whole visible blocks changes nothing. It
    matters where K and V are swapped separately, or where a sliding window depends on the order. A last block that is
    not full is not struck.
    """

    pointing: Pointing = "swapped"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        before = struck.of(part)
        blocks = -(-struck.slots_in_row // self.block)
        uniform = struck.draws.uniform((blocks,), _BLOCKS, struck.step).to(before.device)
        block, offset = struck.slots // self.block, struck.slots % self.block
        stream = struck.rows * struck.n_heads + struck.heads
        whole = torch.bincount(stream * blocks + block, minlength=1)[stream * blocks + block] == self.block
        if self.pointing == "swapped":
            after = before.clone()
            among = whole.nonzero()[:, 0]
            group = stream * self.block + offset
            after[among] = before[among][following(group[among], uniform[block[among]])]
            return after
        others = self._others(struck.context, blocks, uniform)
        if others is None:
            return before
        vectors = of_layer(struck.context.cache, struck.layer, part)
        after = vectors[struck.heads, others[block] * self.block + offset]
        return torch.where(whole[:, None], after, before)

    def _others(
        self, context: FaultContext, blocks: int, uniform: Float[Tensor, "blocks"]
    ) -> Int[Tensor, "blocks"] | None:
        """For each block another block that the prompt fills; None if there is none."""
        filled = ~context.cache.ledger.padding[0]
        full = filled[: len(filled) // self.block * self.block].view(-1, self.block).all(1)
        candidates = full.nonzero()[:, 0]
        if len(candidates) < 2:
            return None
        # A random number of steps on, so never the block itself. A block that is not a candidate may take any.
        place = torch.full((blocks,), -1, device=uniform.device)
        place[candidates] = torch.arange(len(candidates), device=uniform.device)
        choices = len(candidates) - (place >= 0).long()
        return candidates[(place + 1 + (uniform * choices).long()) % len(candidates)]


def following(group: Int[Tensor, "entries"], draws: Float[Tensor, "entries"]) -> Int[Tensor, "entries"]:
    """The index of the next entry of the same group, in the order of `draws`; the first follows the last.

    No entry of a group of two or more is followed by itself.
    """
    order = torch.argsort(draws)
    order = order[torch.argsort(group[order], stable=True)]
    ordered = group[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    index = torch.arange(len(order), device=order.device)
    first = torch.ones_like(last)
    first[1:] = last[:-1]
    start = torch.where(first, index, 0).cummax(0).values if len(index) else index
    successor = torch.where(last, start, index + 1)
    following_entry = torch.empty_like(order)
    following_entry[order] = order[successor]
    return following_entry
