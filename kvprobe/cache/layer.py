"""The tensors of a layer of a cache, by the names of its parts; see `kvprobe.cache.parts`."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.parts import WRITES, PartSize, recurrent, refuse_other_parts
from kvprobe.errors import UserError

Layer = Mapping[str, Float[Tensor, "batch _ slots _"]]
"""What a layer stores, by the names of its parts."""


def shape_of(layer: Layer) -> tuple[PartSize, ...]:
    """The parts of a layer."""
    return tuple(PartSize(name, tensor.shape[1], tensor.shape[3]) for name, tensor in layer.items())


def slots_and_writes(layer: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parts of a layer that it attends to, and those that its state is folded of."""
    slots = {name: tensor for name, tensor in layer.items() if name not in WRITES}
    return slots, {name: tensor for name, tensor in layer.items() if name in WRITES}


def named(layer: Layer, name: str) -> Float[Tensor, "batch _ slots _"]:
    """A part of a layer.

    Raises:
        UserError: it stores other parts.
    """
    if name not in layer:
        raise UserError(
            f"A layer of this cache stores {' and '.join(layer) or 'nothing'}, and this needs {name}; see the page on "
            "memories for what works on such models."
        )
    return layer[name]


def edited_slots(
    known: Bool[Tensor, "batch slots"], before: Sequence[Layer], after: Sequence[Layer]
) -> Bool[Tensor, "batch slots"]:
    """Slots that are known to be edited, and those of which some number is another; all where a part has another
    size."""
    for old, new in zip(before, after, strict=True):
        for name in [name for name in old if old[name] is not new[name]]:
            alike = old[name].shape == new[name].shape
            known = known | (old[name] != new[name]).any(3).any(1) if alike else torch.ones_like(known)
    return known


def refuse_misfit(number: int, layer: Layer, batch: int, slots: int) -> None:
    """Refuse a layer that does not fit a cache with so many rows and slots.

    Raises:
        UserError: its parts are not those of a layer, or are of other shapes or no floats.
    """
    refuse_other_parts(layer)
    heads = {tensor.shape[1] if tensor.dim() == 4 else None for tensor in layer.values()}
    for part, tensor in layer.items():
        fits = tensor.dim() == 4 and (tensor.shape[0], tensor.shape[2]) == (batch, slots)
        fits = fits and (len(heads) == 1 or recurrent(layer))
        if not fits or not tensor.is_floating_point():
            raise UserError(
                f"{part} of layer {number} is {tensor.dtype} of shape {tuple(tensor.shape)}; the cache needs "
                f"floats with (batch, KV heads, slots, numbers), with (batch, slots) = {(batch, slots)} and as many "
                "heads in all parts of a layer."
            )
