"""Changing what slots hold and nothing else: values set to zero (LineageKV), or a direction added (cache steering,
arXiv 2507.08799)."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache, Slots
from kvprobe.cache.indices import indices
from kvprobe.errors import UserError

Content = Literal["V", "latent", "value"]
"""A part that holds content."""
Steered = Literal["K", "V", "latent", "value"]
"""A part to which a direction can be added."""


@checked_arguments
def zero(
    cache: KVCache,
    *segments: str,
    slots: Slots | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    part: Content = "V",
) -> KVCache:
    """The cache with zeros for the values of these slots, which still take the attention that their keys draw.

    To undo it, patch the part of these slots from the old cache; that they were edited stays in the ledger.

    Args:
        segments, slots, layers, heads: which, as for `KVCache.mask`.
        part: V, in the layers that store it; the latent, of which keys come too; or what is written to a state.

    Raises:
        UserError: a layer does not store this part, or there is no such segment, slot, layer or head.
    """
    layers = _storing(cache, part, layers)
    blank = (
        {name: torch.zeros_like(tensor) if name == part else tensor for name, tensor in layer.items()}
        for layer in cache.layers
    )
    donor = KVCache(tuple(blank), cache.ledger, cache.made_by)
    return cache.patch(donor, *segments, slots=slots, layers=layers, heads=heads, part=part)


@checked_arguments
def steer(
    cache: KVCache,
    directions: Float[Tensor, "layers heads numbers"],
    *segments: str,
    slots: Slots | None = None,
    layers: Sequence[int] | None = None,
    part: Steered = "V",
    scale: float = 1.0,
) -> KVCache:
    """The cache with a direction added to a part of these slots, another in each layer and head.

    The same with `-scale` undoes it, up to rounding. Keys are those of the cache: rotated to `ledger.origins`, which
    `Model.as_seen` changes.

    Args:
        directions: one for each of `layers`, for each head (or one for all) and each number of the part.
        segments, slots: which, as for `KVCache.mask`.
        layers: to which; all that store the part by default.

    Raises:
        UserError: a layer does not store this part, the directions do not fit it or are not finite, or what they give
            is too large for the cache's numbers.
    """
    wanted = _storing(cache, part, layers)
    if not bool(directions.isfinite().all()):
        raise UserError("A direction holds NaN or infinity; give finite numbers.")
    if directions.shape[0] != len(wanted):
        raise UserError(f"There are {directions.shape[0]} directions for {len(wanted)} layers; give one for each.")
    steered = [dict(layer) for layer in cache.layers]
    for direction, number in zip(directions, wanted, strict=True):
        held = steered[number][part]
        if direction.shape[1] != held.shape[3] or direction.shape[0] not in (1, held.shape[1]):
            raise UserError(
                f"{part} of layer {number} has {held.shape[1]} heads of {held.shape[3]} numbers, a direction "
                f"{direction.shape[0]} of {direction.shape[1]}; give as many."
            )
        moved = held.float() + scale * direction.to(held.device, torch.float32)[None, :, None]
        steered[number][part] = moved.to(held.dtype)
        if not bool((steered[number][part].isfinite() | ~held.isfinite()).all()):
            raise UserError(f"{part} of layer {number} overflows {held.dtype}; give a smaller scale.")
    donor = KVCache(tuple(steered), cache.ledger, cache.made_by)
    return cache.patch(donor, *segments, slots=slots, part=part)


def _storing(cache: KVCache, part: str, layers: Sequence[int] | None) -> list[int]:
    """The chosen layers, all of which store a part; all that do by default."""
    storing = [number for number, layer in enumerate(cache.layers) if part in layer]
    wanted = storing if layers is None else indices("layer", layers, cache.n_layers)
    if not wanted or set(wanted) - set(storing):
        raise UserError(f"{part} is stored by layers {storing or 'none'} of this cache; choose of those.")
    return wanted
