"""How queries share out their attention among places, under several caches at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.forward import onwards, prove_reading
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


def attention_shares(
    model: Model, caches: KVCache, tokens: Tokens, places: Sequence[Bool[Tensor, "rows slots"]]
) -> Float[Tensor, "rows layers heads places_and_self"]:
    """The share of their attention that these tokens spend on each place of a cache and, last, on themselves; means
    over the tokens.

    `kvprobe.attention.attend` gives every query's pattern, under one cache.

    Args:
        caches: as rows; the tokens are read after each, where its own positions end.
        places: which slots of each cache belong to a place. A slot of no place is left out of the sum.

    Raises:
        UserError: a slot belongs to several places.
    """
    masks = torch.stack(list(places))
    if bool((masks.sum(0) > 1).any()):
        raise UserError("A slot belongs to several places, so shares would count it twice; give each slot one place.")
    shares: dict[int, Tensor] = {}

    def observe(layer: int, pattern: Tensor) -> None:
        before, itself = pattern[..., : caches.slots].mean(2), pattern[..., caches.slots :].sum(-1).mean(2)
        shared = torch.einsum("bhs,gbs->bhg", before.float(), masks.float())
        shares[layer] = torch.cat([shared, itself[..., None].float()], -1)

    runs = onwards(caches, [tokens])
    prove_reading(model.lanes, caches, runs, "hooked")
    with model.lanes.hooked.observing_patterns(observe):
        model.extend(caches, runs, lane="hooked", chunk=len(tokens))
    return torch.stack([shares[layer] for layer in range(model.geometry.n_layers)], 1)
