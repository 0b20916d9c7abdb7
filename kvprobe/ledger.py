"""The ledger: what is known of every slot of a cache.

Positions, segments, provenance and liveness travel with the slots. Nothing here is ever inferred from a
length, so an eviction cannot silently move a token (the bug of every home-made eviction script).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvprobe.suggest import unknown

PADDING = -1
"""Segment index of a slot that holds no token."""


@dataclass(frozen=True)
class Ledger:
    """One entry per slot, for each row of the batch.

    Attributes:
        tokens: vocabulary id of the token in the slot.
        positions: the logical index that the model's position encoding gave the token.
        segments: index into `names`, or `PADDING`.
        recomputed: provenance; true where the slot was computed without text that once stood before it.
        live: whether later queries may attend to the slot, per layer and KV head. The layer and head axes are
            1 where all layers or heads agree.
        following: the position after the last token that was read, which an eviction of that token does not change.
        names: segment names, in order of first appearance.
    """

    tokens: Int[Tensor, "batch slots"]
    positions: Int[Tensor, "batch slots"]
    segments: Int[Tensor, "batch slots"]
    recomputed: Bool[Tensor, "batch slots"]
    live: Bool[Tensor, "layers batch kv_heads slots"]
    following: Int[Tensor, "batch"]
    names: tuple[str, ...]

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    @property
    def uniform(self) -> bool:
        """Whether all layers and heads agree on which slots are live."""
        return self.live.shape[0] == 1 and self.live.shape[2] == 1

    @property
    def padding(self) -> Bool[Tensor, "batch slots"]:
        return self.segments == PADDING

    @property
    def untouched(self) -> bool:
        """Whether every slot is live and its position is its index, as in a cache that nobody edited."""
        index = torch.arange(self.slots, device=self.positions.device)
        return bool(self.live.all()) and bool((self.positions == index).all())

    def in_segments(self, names: Sequence[str]) -> Bool[Tensor, "batch slots"]:
        """Slots that belong to any of the named segments; an unknown name is refused."""
        found = torch.zeros_like(self.segments, dtype=torch.bool)
        for name in names:
            if name not in self.names:
                raise ValueError(unknown("segment", name, self.names))
            found |= self.segments == self.names.index(name)
        return found

    def take(self, slots: Int[Tensor, "batch kept"], padding: Bool[Tensor, "batch kept"]) -> "Ledger":
        """The ledger of the slots at these indices, row by row; `padding` marks the ones that hold nothing."""
        layers, _, heads, _ = self.live.shape
        index = slots[None, :, None, :].expand(layers, -1, heads, -1)
        return replace(
            self,
            tokens=self.tokens.gather(1, slots),
            positions=self.positions.gather(1, slots),
            segments=self.segments.gather(1, slots).masked_fill(padding, PADDING),
            recomputed=self.recomputed.gather(1, slots),
            live=self.live.gather(3, index) & ~padding[None, :, None, :],
        )

    def rows(self, index: Int[Tensor, "rows"]) -> "Ledger":
        """The ledger of these rows of the batch."""
        return replace(
            self,
            tokens=self.tokens[index],
            positions=self.positions[index],
            segments=self.segments[index],
            recomputed=self.recomputed[index],
            live=self.live[:, index],
            following=self.following[index],
        )

    def append(self, other: "Ledger") -> "Ledger":
        """This ledger followed by another of the same batch, segment names merged."""
        names = self.names + tuple(name for name in other.names if name not in self.names)
        # One entry more than there are names: the last is where PADDING (-1) lands.
        renumber = torch.tensor([names.index(name) for name in other.names] + [PADDING], device=other.segments.device)
        layers = max(self.live.shape[0], other.live.shape[0])
        heads = max(self.live.shape[2], other.live.shape[2])

        def wide(live: Tensor) -> Tensor:
            return live.expand(layers, -1, heads, -1)

        return Ledger(
            tokens=torch.cat([self.tokens, other.tokens], 1),
            positions=torch.cat([self.positions, other.positions], 1),
            segments=torch.cat([self.segments, renumber[other.segments]], 1),
            recomputed=torch.cat([self.recomputed, other.recomputed], 1),
            live=torch.cat([wide(self.live), wide(other.live)], 3),
            following=other.following,
            names=names,
        )

    def to(self, device: torch.device | str) -> "Ledger":
        return replace(
            self,
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            segments=self.segments.to(device),
            recomputed=self.recomputed.to(device),
            live=self.live.to(device),
            following=self.following.to(device),
        )
