"""The attention that each slot has received: the record from which score-based policies decide."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.brief import Brief


@dataclass(frozen=True, repr=False)
class Attention(Brief):
    """Attention weights, averaged over the query heads that share a KV head, of the layers of `Scene.live`.

    Attributes:
        total: sum over all queries so far.
        recent: weights of the last queries, oldest first; rows of zeros where there were fewer queries.
    """

    total: Float[Tensor, "layers batch kv_heads slots"]
    recent: Float[Tensor, "layers batch kv_heads queries slots"]

    @classmethod
    def none(
        cls, layers: int, batch: int, kv_heads: int, slots: int, queries: int, device: torch.device
    ) -> "Attention":
        """An empty record of this many slots, which will hold the last `queries` queries."""
        shape = (layers, batch, kv_heads)
        return cls(torch.zeros(*shape, slots, device=device), torch.zeros(*shape, queries, slots, device=device))

    def take(self, slots: Int[Tensor, "batch kept"], padding: Bool[Tensor, "batch kept"]) -> "Attention":
        """The record of these slots, row by row and in this order."""

        def taken(tensor: Tensor) -> Tensor:
            lead = (tensor.shape[0], -1, *tensor.shape[2:-1], -1)
            shape = (1, slots.shape[0], *[1] * (tensor.dim() - 3), slots.shape[1])
            return tensor.gather(-1, slots.view(shape).expand(lead)).masked_fill(padding.view(shape), 0.0)

        return Attention(taken(self.total), taken(self.recent))

    def fork(self, rows: int) -> "Attention":
        """A record of one row, shared by `rows` copies of it; a record of several rows, unchanged."""
        if self.total.shape[1] != 1:
            return self
        return Attention(self.total.expand(-1, rows, -1, -1), self.recent.expand(-1, rows, -1, -1, -1))

    def after(self, digests: "Sequence[Digest]", padding: Bool[Tensor, "batch new"]) -> "Attention":
        """The record after a forward pass, from one digest per layer; `padding` marks queries that hold no token."""
        total = torch.stack([digest.total for digest in digests])
        last = torch.stack([digest.last for digest in digests])
        grown = total.shape[3] - self.total.shape[3]
        before = torch.nn.functional.pad(self.recent, (0, grown))
        # Rows read different numbers of queries: each holds as many old ones as the new ones leave room for.
        queries = before.shape[3]
        places = torch.arange(queries, device=padding.device)
        count = (~padding).sum(1)[:, None].clamp(max=queries)
        index = (places + count).clamp(max=max(queries - 1, 0))[None, :, None, :, None]
        old = before.gather(3, index.expand_as(before))
        is_new = (places >= queries - count)[None, :, None, :, None]
        return Attention(torch.nn.functional.pad(self.total, (0, grown)) + total, torch.where(is_new, last, old))


@dataclass(frozen=True)
class Digest:
    """The sums of one layer's attention in one forward pass, so that the patterns themselves need not be held.

    Attributes:
        total: sum over the queries of the pass.
        last: weights of its last queries; rows of zeros come first where there are fewer.
    """

    total: Float[Tensor, "batch kv_heads slots"]
    last: Float[Tensor, "batch kv_heads queries slots"]

    @classmethod
    def of(
        cls,
        pattern: Float[Tensor, "batch heads new slots"],
        kv_heads: int,
        padding: Bool[Tensor, "batch new"],
        queries: int,
    ) -> "Digest":
        """The digest of one layer's weights, without the queries in `padding`."""
        grouped = torch.unflatten(pattern.float(), 1, (kv_heads, -1))
        weights = grouped.mean(2).masked_fill(padding[:, None, :, None], 0.0)
        wanted = (~padding).sum(1)[:, None] - queries + torch.arange(queries, device=padding.device)
        last = weights.gather(2, wanted.clamp(min=0)[:, None, :, None].expand(-1, kv_heads, -1, weights.shape[3]))
        return cls(weights.sum(2), last.masked_fill((wanted < 0)[:, None, :, None], 0.0))

    @staticmethod
    def mean(readers: "Sequence[Digest]") -> "Digest":
        """The digest of a layer whose slots several read."""
        total, last = (torch.stack([getattr(reader, name) for reader in readers]) for name in ("total", "last"))
        return readers[0] if len(readers) == 1 else Digest(total.mean(0), last.mean(0))
