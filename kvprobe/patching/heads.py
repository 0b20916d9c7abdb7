"""K and V of each head, as attention reads them: stored, or computed by the model from the latents of its layers."""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import named
from kvprobe.cache.parts import KV, attends
from kvprobe.inference.forward import forward_pass, taps
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.text.tokens import Tokens

Heads = dict[str, dict[int, Float[Tensor, "heads slots d"]]]
"""K and V of each layer that has them, by its number."""


def heads_of(lanes: Lanes, cache: KVCache, suffix: Tokens) -> Heads:
    """K and V of each KV head of a cache of one row; with latent attention, those of each query head.

    Args:
        suffix: what can be read after the cache, if only its first token.
    """
    if not any("latent" in layer for layer in cache.layers):
        layers = {number: layer for number, layer in enumerate(cache.layers) if attends(layer)}
        return {part: {number: named(layer, part)[0] for number, layer in layers.items()} for part in KV}
    read: dict[int, dict[str, Tensor]] = {}

    def observe(attending: Attending) -> None:
        both = zip(KV, (attending.key, attending.value), strict=True)
        read[attending.layer] = {part: tensor[0, :, : cache.slots] for part, tensor in both}

    with warnings.catch_warnings(), torch.no_grad(), lanes.observing_attention(observe):
        warnings.simplefilter("ignore")  # of positions, of which the caller has been warned
        forward_pass(lanes, cache, [suffix[:1]], taps(lanes, cache, store=False), "plain", 1)
    return {part: {layer: read[layer][part] for layer in sorted(read)} for part in KV}
