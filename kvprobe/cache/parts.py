"""What a layer stores of each slot, part by part.

K and V of each KV head; or, with latent attention (DeepSeek), one latent of which all heads compute their K and V, and
one rotated key that all heads share: content and position, apart. Where a sparse index chooses the slots that a query
attends to (DeepSeek V3.2, GLM-5), one more key, by which it finds the slot; or, in a recurrent layer, what the token
wrote into its state (Qwen3-Next; see `kvprobe.cache.recurrence`).
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError

KV: tuple[Literal["K"], Literal["V"]] = ("K", "V")
LATENT: tuple[Literal["latent"], Literal["rope"]] = ("latent", "rope")
INDEX: Literal["index"] = "index"
"""The parts of a layer, in the order in which transformers' cache holds them."""
WRITES = ("key", "value", "decay", "step", "conv")
"""The parts of a recurrent layer: the key that a token writes at (not normalised); the value that it writes; how far
the state decays before it, and after it where slots were evicted there (logarithms); how far the state goes towards the
value; and what the short convolution was given."""
ROTATED = ("K", "rope", INDEX)
"""The parts that are rotated by position."""
_LAYERS = (KV, LATENT, (*LATENT, INDEX), WRITES)

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


def recurrent(layer: Iterable[str]) -> bool:
    """Whether a layer of these parts keeps a state, of which it stores what each token wrote."""
    return tuple(layer) == WRITES


def refuse_other_parts(names: Iterable[str]) -> None:
    """Refuse parts that are not those of any layer."""
    if (given := tuple(names)) not in _LAYERS:
        known = ", or ".join(" and ".join(parts) for parts in _LAYERS)
        raise UserError(f"A layer stores {known}; got {', '.join(given) or 'nothing'}.")


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


def attended(layer: Layer) -> tuple[Float[Tensor, "batch _ slots _"], ...]:
    """The parts of a layer that attends, in the order in which transformers' cache holds them.

    Raises:
        UserError: the layer is recurrent.
    """
    if recurrent(layer):
        raise UserError(
            "This needs layers that store vectors of each slot, and the cache has recurrent layers, which store what "
            "tokens wrote into a state; see the page on memories for what works on such models."
        )
    return tuple(layer.values())


def described(shape: Shape, sizes: bool = True) -> str:
    """What layers store, in a few words."""

    def words(parts: tuple[PartSize, ...]) -> str:
        if recurrent(part.name for part in parts):
            key, value = parts[:2]
            return f"writes to a state of {value.heads} heads" + (
                f" of {key.numbers} × {value.numbers}" if sizes else ""
            )
        if tuple(part.name for part in parts) != KV:
            return " and ".join(f"{part.name} {part.numbers}" for part in parts)
        widths = " and ".join(map(str, dict.fromkeys(part.numbers for part in parts)))
        return f"{parts[0].heads} KV heads" + (f" of {widths}" if sizes else "")

    return " or ".join(dict.fromkeys(map(words, shape)))
