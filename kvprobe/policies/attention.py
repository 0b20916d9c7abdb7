"""What queries have paid to each slot: the record that score-based policies decide by."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Attention:
    """Attention weights, averaged over the query heads that share a KV head.

    Attributes:
        total: summed over all queries so far.
        recent: of the last queries, oldest first; zero rows stand for queries that there were not.
    """

    total: Float[Tensor, "layers batch kv_heads slots"]
    recent: Float[Tensor, "layers batch kv_heads queries slots"]

    @classmethod
    def none(
        cls, layers: int, batch: int, kv_heads: int, slots: int, queries: int, device: torch.device
    ) -> "Attention":
        """Nothing seen yet of this many slots; the last `queries` queries are to be remembered."""
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
        """The record of a cache of one row, shared by `rows` copies of it; of several rows, as it is."""
        if self.total.shape[1] != 1:
            return self
        return Attention(self.total.expand(-1, rows, -1, -1), self.recent.expand(-1, rows, -1, -1, -1))

    def after(self, passed: "Sequence[Digest]", padding: Bool[Tensor, "batch new"]) -> "Attention":
        """The record after a pass; `passed` has one digest for each layer, `padding` marks queries that are none."""
        total = torch.stack([each.total for each in passed])
        last = torch.stack([each.last for each in passed])
        grown = total.shape[3] - self.total.shape[3]
        before = torch.nn.functional.pad(self.recent, (0, grown))
        # Rows read different numbers of queries: each keeps as many old ones as the new ones leave room for.
        kept = before.shape[3]
        places = torch.arange(kept, device=padding.device)
        count = (~padding).sum(1)[:, None].clamp(max=kept)
        index = (places + count).clamp(max=max(kept - 1, 0))[None, :, None, :, None]
        old = before.gather(3, index.expand_as(before))
        is_new = (places >= kept - count)[None, :, None, :, None]
        return Attention(torch.nn.functional.pad(self.total, (0, grown)) + total, torch.where(is_new, last, old))


@dataclass(frozen=True)
class Digest:
    """What one layer's attention of one pass comes to, so that the patterns themselves need not be held.

    Attributes:
        total: over the queries of the pass.
        last: of its last queries, at the end where there are fewer.
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
        """The digest of one layer's weights; rows of `padding` count for nothing."""
        weights = pattern.float().unflatten(1, (kv_heads, -1)).mean(2).masked_fill(padding[:, None, :, None], 0.0)
        wanted = (~padding).sum(1)[:, None] - queries + torch.arange(queries, device=padding.device)
        last = weights.gather(2, wanted.clamp(min=0)[:, None, :, None].expand(-1, kv_heads, -1, weights.shape[3]))
        return cls(weights.sum(2), last.masked_fill((wanted < 0)[:, None, :, None], 0.0))
