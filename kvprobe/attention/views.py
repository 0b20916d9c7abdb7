"""Views: segments of a cache that only some KV heads may see, and what the model then says.

The more of an answer comes back when a hidden segment is in view of a few heads, the more these use it, which attention
alone does not show. Query heads that share a KV head see the same slots, so views are given by KV head.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.cache.indices import indices
from kvprobe.checks import names_of
from kvprobe.inference.model import Model, Readable
from kvprobe.inference.readable import only_run
from kvprobe.tidy import Rows

AT_ONCE = 12
"""Views that are read as rows of one batch."""

KVHead = tuple[int, int]
"""Layer and KV head."""


@checked_arguments
def in_view_of(cache: KVCache, hide: str | Sequence[str], heads: Sequence[KVHead]) -> KVCache:
    """The cache with these segments masked for all KV heads but the given ones.

    Raises:
        UserError: there is no such segment, layer or KV head.
    """
    shape = (cache.n_layers, cache.batch, cache.n_kv_heads, cache.slots)
    masked = cache.mask(*names_of(hide))
    before, live = cache.ledger.live.expand(shape), masked.ledger.live.expand(shape).clone()
    layers = indices("layer", [layer for layer, _ in heads], shape[0])
    for layer, head in zip(layers, indices("KV head", [head for _, head in heads], shape[2]), strict=True):
        live[layer, :, head] = before[layer, :, head]
    return replace(masked, ledger=replace(masked.ledger, live=live))


@checked_arguments
def logits_in_view(
    model: Model, cache: KVCache, suffix: Readable, hide: str | Sequence[str], views: Sequence[Sequence[KVHead]]
) -> Float[Tensor, "views vocab"]:
    """Logits after a suffix, with these segments hidden from all KV heads but those of each view.

    Args:
        cache: one row, with the segments in view.

    Raises:
        UserError: see `in_view_of`.
    """
    read, logits = only_run(model.tokens_after(cache, suffix, "suffix"), "suffix"), []
    for first in range(0, len(views), AT_ONCE):
        rows = KVCache.join([in_view_of(cache, hide, heads) for heads in views[first : first + AT_ONCE]])
        logits.append(model.extend(rows, [read] * rows.batch)[1][:, -1].float())
    return torch.cat(logits)


@checked_arguments
def ranked_kv_heads(heads: Rows, of: str, group: int) -> list[KVHead]:
    """KV heads by the mean of a column over their query heads, the largest first.

    Args:
        heads: one row or more per `layer` and query `head`, as `dangling` and `Patterns.df` give.
        group: query heads that share a KV head.
    """
    layers, kv_heads = heads["layer"].astype(int), heads["head"].astype(int) // group
    means = heads.groupby([layers, kv_heads])[of].mean().sort_values(ascending=False)
    places: list[tuple[int, int]] = means.index.tolist()
    return [(int(layer), int(head)) for layer, head in places]
