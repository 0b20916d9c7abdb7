"""What a layer stores of each slot, part by part.

K and V of each KV head; or, with latent attention (DeepSeek), one latent of which all heads compute their K and V, and
one rotated key that all heads share: content and position, apart.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError

KV: tuple[Literal["K"], Literal["V"]] = ("K", "V")
LATENT: tuple[Literal["latent"], Literal["rope"]] = ("latent", "rope")
"""The parts of a layer, in the order in which transformers' cache holds them."""
_ROTATED = ("K", "rope")
"""The parts that are rotated by position."""

Layer = Mapping[str, Float[Tensor, "batch _ slots _"]]
"""What a layer stores, by the names of its parts."""


class PartSize(NamedTuple):
    """The size of a part of what a layer stores of one slot."""

    name: str
    heads: int
    numbers: int


Shape = tuple[tuple[PartSize, ...], ...]
"""The parts of each layer."""


def shape_of(layer: Layer) -> tuple[PartSize, ...]:
    """The parts of a layer."""
    return tuple(PartSize(name, tensor.shape[1], tensor.shape[3]) for name, tensor in layer.items())


def position_part(layer: Layer) -> str:
    """The part of a layer that knows the position of its slot.

    Raises:
        UserError: the parts are not those of any layer.
    """
    if tuple(layer) not in (KV, LATENT):
        raise UserError(
            f"A layer stores {' and '.join(KV)}, or {' and '.join(LATENT)}; got {', '.join(layer) or 'nothing'}."
        )
    return next(name for name in layer if name in _ROTATED)


def named(layer: Layer, name: str) -> Float[Tensor, "batch _ slots _"]:
    """A part of a layer.

    Raises:
        UserError: it stores other parts.
    """
    if name not in layer:
        raise UserError(
            f"A layer of this cache stores {' and '.join(layer)}, and this needs {name}; see the page on memories for "
            "what works on such models."
        )
    return layer[name]


def both(layer: Layer) -> tuple[Float[Tensor, "batch _ slots _"], Float[Tensor, "batch _ slots _"]]:
    """The two parts of a layer, in the order in which transformers' cache holds them."""
    first, second = layer.values()
    return first, second


def described(shape: Shape, sizes: bool = True) -> str:
    """What layers store, in a few words."""

    def words(parts: tuple[PartSize, ...]) -> str:
        if tuple(part.name for part in parts) != KV:
            return " and ".join(f"{part.name} {part.numbers}" for part in parts)
        widths = " and ".join(map(str, dict.fromkeys(part.numbers for part in parts)))
        return f"{parts[0].heads} KV heads" + (f" of {widths}" if sizes else "")

    return " or ".join(dict.fromkeys(map(words, shape)))
