"""The attention formula, of which everything that reads or changes attention makes use: a softmax over scaled scores.

Query heads that share a KV head are beside each other, and everything is in fp32.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def scores_of(
    products: Float[Tensor, "*axes queries slots"],
    scale: float,
    softcap: float | None = None,
    hidden: Bool[Tensor, "*#axes queries slots"] | None = None,
) -> Float[Tensor, "*axes queries slots"]:
    """Scores from the products of queries and keys, which are written over: scaled, and −∞ where slots are hidden.

    Args:
        softcap: the value at which scores saturate (Gemma 2); None where they do not.
    """
    scores = products.mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_() * softcap
    return scores if hidden is None or not bool(hidden.any()) else scores.masked_fill_(hidden, -torch.inf)


def weights_of(
    query: Float[Tensor, "rows heads queries d_head"],
    key: Float[Tensor, "rows kv_heads slots d_head"],
    seen: Bool[Tensor, "#rows #kv_heads queries slots"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "heads"] | None = None,
) -> Float[Tensor, "rows heads queries slots"]:
    """The share of its attention that each query pays each slot it sees.

    Args:
        softcap: see `scores_of`.
        sinks: scores of the model's own attention sinks (gpt-oss), which take attention but are not slots; or None.
    """
    rows, heads, queries, _ = query.shape
    grouped = torch.unflatten(query.float(), 1, (key.shape[1], -1))
    products = grouped.flatten(2, 3) @ key.float().transpose(2, 3)
    scores = scores_of(products.view(*grouped.shape[:-1], -1), scale, softcap, ~seen[:, :, None]).flatten(1, 2)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float()[:, None, None].expand(rows, heads, queries, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def output_of(
    weights: Float[Tensor, "rows heads queries slots"], value: Float[Tensor, "rows kv_heads slots d_value"]
) -> Float[Tensor, "rows heads queries d_value"]:
    """What each query reads: the values of the slots, weighted."""
    grouped = torch.unflatten(weights, 1, (value.shape[1], -1))
    return (grouped.flatten(2, 3) @ value.float()).view(*grouped.shape[:-1], -1).flatten(1, 2)
