"""Memory that is written in one layout and read in another."""

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.faults.fault import Fault
from kvprobe.faults.paged import Paged
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck

MemoryOrder = Literal[
    "part slot head", "part head slot", "slot part head", "slot head part", "head part slot", "head slot part"
]
"""The axes of a block in memory, outermost first; `part` is K or V, and the numbers of a vector come last."""


@dataclass(frozen=True)
class Misread(Paged):
    """Blocks whose memory was written in one order of axes and is read in another.

    The defaults are the change of vllm PR #44455, from K and V apart to K and V of a slot side by side, seen by a
    reader that does not know of it: dynamo #14416. In LMCache #4463 memory is `slot head part`, and is read as `slot
    part head`, which with two KV heads has the same shape. With one KV head those two are the same.

    A block that is only partly in scope, in its slots or heads, is left alone.

    Attributes:
        written: the order in which the block is in memory.
        read: the order in which it is taken to be.
    """

    written: MemoryOrder = "head slot part"
    read: MemoryOrder = "part slot head"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        if struck.keys.shape != struck.values.shape:
            raise UserError(
                f"Keys have {struck.keys.shape[1]} numbers and values {struck.values.shape[1]}; Misread needs equal "
                "widths, use another fault for this model."
            )
        after = struck.of(part).clone()
        whole, order = _whole_blocks(struck, self.block)
        index = whole.nonzero()[:, 0][order]
        sizes = {"head": struck.n_heads, "slot": self.block, "part": 2}
        both = torch.stack([struck.keys[index], struck.values[index]])
        memory = rearrange(both, f"part (block head slot) d -> block ({self.written}) d", **sizes)
        seen = rearrange(memory, f"block ({self.read}) d -> part (block head slot) d", **sizes)
        after[index] = seen[0 if part == "k" else 1]
        return after


@dataclass(frozen=True)
class ChannelOrder(Fault):
    """Keys whose rotary pairs lie side by side, and are read as if half a key apart.

    llama.cpp stores the keys of Llama models so, and transformers does not: a cache that is moved from one to the other
    must be reordered.
    """

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        before = struck.of(part)
        if part not in ("k", "rope"):
            return before
        return rearrange(before, "struck (half pair) -> struck (pair half)", half=2)


def _whole_blocks(struck: Struck, block: int) -> tuple[Bool[Tensor, "struck"], Int[Tensor, "whole"]]:
    """Which struck slots are of blocks that are struck whole, in all heads; and the order that puts the slots of each
    block side by side, head by head."""
    blocks = -(-struck.slots_in_row // block)
    group = struck.rows * blocks + struck.slots // block
    whole = (torch.bincount(group, minlength=1) == block * struck.n_heads)[group]
    place = (group * struck.n_heads + struck.heads) * block + struck.slots % block
    return whole, place[whole].argsort()
