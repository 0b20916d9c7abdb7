"""Erasers applied to a cache: a concept is taken out of K and V in chosen slots, or exchanged for another run's.

An eraser belongs to one layer and to K or V, and reads a slot's vectors of all KV heads side by side, or each head's by
itself (then its tensors begin with an axis of KV heads). Keys are taken as they are stored: fit erasers on stored keys
too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.cache.alike import refuse_other_slots
from kvprobe.cache.cache import KVCache, Slots, combined
from kvprobe.erasing.subspace import Eraser, Subspace
from kvprobe.errors import UserError

LayerPart = tuple[int, str]
"""A layer, and `K` or `V`."""


@checked_arguments
def erase(
    cache: KVCache,
    erasers: Mapping[LayerPart, Eraser],
    *segments: str,
    slots: Slots | None = None,
    strength: float = 1.0,
) -> KVCache:
    """The cache without the concept in these slots.

    Args:
        segments: names of segments to erase in.
        slots: or the slots: a boolean per row and slot, or a list of indices for all rows.
        strength: see `Eraser.erased`.

    Raises:
        UserError: a layer or part that does not exist, an eraser of another width, or no such segment.
    """

    def erased(layer_part: LayerPart, vectors: Tensor, where: Int[Tensor, "picked"]) -> Tensor:
        eraser = erasers[layer_part]
        return _of_slots(vectors, eraser, lambda features: eraser.erased(features, strength))

    return _rewritten(cache, erasers, cache.chosen(segments, slots), erased)


@checked_arguments
def interchange(
    base: KVCache,
    donor: KVCache,
    subspaces: Mapping[LayerPart, Subspace],
    *segments: str,
    slots: Slots | None = None,
    strength: float = 1.0,
) -> KVCache:
    """The base with what the donor holds inside these subspaces, slot by slot (Geiger et al. 2023, arXiv 2303.02536).

    With a donor that holds the average of many runs that differ in a concept, this erases the concept, as erasers do
    that were fitted on features minus each run's own average.

    Args:
        donor: of the same slots; see `kvprobe.patching.aligned` for one of others.
        segments: names of segments to exchange in.
        slots: or the slots: a boolean per row and slot, or a list of indices for all rows.
        strength: 0 leaves the base as it is, 1 exchanges, values between them mix the two, and beyond 1 the difference
            is exaggerated.

    Raises:
        UserError: as `erase`, or a donor of another model, slots or positions of keys.
    """
    chosen = base.chosen(segments, slots)
    refuse_other_slots(base, donor, chosen, segments, keys=any(part == "K" for _, part in subspaces))

    def exchanged(layer_part: LayerPart, vectors: Tensor, where: Int[Tensor, "picked"]) -> Tensor:
        layer, part = layer_part
        change = donor.part(part)[layer].index_select(2, where) - vectors
        subspace = subspaces[layer_part]
        return vectors + strength * _of_slots(change, subspace, subspace.inside)

    changed = _rewritten(base, subspaces, chosen, exchanged)
    return replace(changed, ledger=base.ledger.computed_as(donor.ledger))


@checked_arguments
def mix(
    base: KVCache,
    donor: KVCache,
    *segments: str,
    slots: Slots | None = None,
    layers: Sequence[int] | None = None,
    strength: float = 1.0,
) -> KVCache:
    """The base with whole vectors moved towards the donor's, beside which an interchange inside a subspace is judged.

    Args:
        donor: of the same slots.
        segments, slots, strength: see `interchange`.
        layers: all by default.

    Raises:
        UserError: as `KVCache.patch`.
    """
    moved = base.patch(donor, *segments, slots=slots, layers=layers)
    return combined((base, moved), lambda pair: pair[0].lerp(pair[1], strength), moved.ledger)


def _refuse_unfit(cache: KVCache, subspaces: Mapping[LayerPart, Subspace]) -> None:
    """Refuse subspaces of a layer or part that does not exist, or of another width than its slots."""
    for (layer, part), subspace in subspaces.items():
        if part not in ("K", "V") or not 0 <= layer < cache.n_layers:
            raise UserError(
                f"There is no {part!r} at layer {layer}; give subspaces for K or V of layers 0 to {cache.n_layers - 1}."
            )
        _, heads, _, width = cache.part(part)[layer].shape
        shape = tuple(subspace.read.shape[:-1])
        if shape not in ((heads * width,), (heads, width)):
            raise UserError(
                f"The subspace for {part} of layer {layer} reads vectors of shape {shape}; expected "
                f"({heads * width},), which is KV heads × numbers to a head, or ({heads}, {width}) for each head by "
                "itself."
            )


def _rewritten(
    cache: KVCache,
    subspaces: Mapping[LayerPart, Subspace],
    chosen: Bool[Tensor, "batch slots"],
    edit: Callable[[LayerPart, Tensor, Tensor], Tensor],
) -> KVCache:
    """The cache with the vectors of these slots edited in each layer and part that has a subspace."""
    _refuse_unfit(cache, subspaces)
    where = chosen.any(0).nonzero()[:, 0]
    picked = chosen[:, where][:, None, :, None]

    def edited(part: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        layers = list(tensors)
        for layer, tensor in enumerate(tensors):
            if (layer, part) in subspaces:
                vectors = tensor.index_select(2, where)
                new = torch.where(picked, edit((layer, part), vectors, where), vectors)
                layers[layer] = tensor.index_copy(2, where, new)
        return tuple(layers)

    return cache.with_parts({"K": edited("K", cache.keys), "V": edited("V", cache.values)})


def _of_slots(
    tensor: Float[Tensor, "batch kv_heads slots d"], subspace: Subspace, edit: Callable[[Tensor], Tensor]
) -> Float[Tensor, "batch kv_heads slots d"]:
    """The vectors edited as the subspace reads them: each head's by itself, or those of all heads side by side."""
    if subspace.read.dim() == 3:
        return edit(tensor).to(tensor.dtype)
    heads, width = tensor.shape[1], tensor.shape[3]
    return edit(tensor.transpose(1, 2).flatten(2)).unflatten(2, (heads, width)).transpose(1, 2).to(tensor.dtype)
