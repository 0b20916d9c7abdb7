"""Places: where a dictionary reads, as a family at a layer with KV heads side by side, and its name in sae-lens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.inference.capture import plain_ports
from kvprobe.models.geometry import Geometry
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import HOOKS, PER_HEAD, Family, hook_name, site_of
from kvprobe.models.ports import Port
from kvprobe.names import unknown

FAMILIES: tuple[Family, ...] = tuple(family for family in HOOKS if family != "k")
"""Families that a dictionary may read. Keys are read before they are rotated: a rotated key is its content at one
position, and a dictionary would need a copy of each latent for each position."""


@dataclass(frozen=True, order=True)
class Place:
    """A family at a layer; written `v.7`."""

    family: Family
    layer: int

    @classmethod
    def parse(cls, text: str) -> "Place":
        """A place as it is written.

        Raises:
            UserError: it is not a family of `FAMILIES`, a dot and a number.
        """
        family, _, layer = text.partition(".")
        if not layer.isdigit():
            raise UserError(f"A place must be a family and a layer, such as 'resid_post.7'; got {text!r}.")
        for known in FAMILIES:
            if family == known:
                return cls(known, int(layer))
        raise UserError(unknown("family of a dictionary", family, FAMILIES))

    @classmethod
    def of_hook(cls, name: str) -> "Place":
        """The place of a TransformerLens hook.

        Raises:
            UserError: a hook that kvprobe does not read dictionaries at.
        """
        site = site_of(name)
        if site is not None and site[0] in FAMILIES:
            return cls(*site)
        known = ", ".join(HOOKS[family] for family in FAMILIES)
        raise UserError(
            f"The SAE was trained at {name!r}, which kvprobe does not read; expected 'blocks.LAYER.' and one of "
            f"{known}."
        )

    @property
    def hook(self) -> str:
        """Its TransformerLens hook."""
        return hook_name(self.family, self.layer)

    def width(self, shape: Geometry) -> int:
        """How many numbers a token has there."""
        return shape.n_kv_heads * shape.d_head if self.family in PER_HEAD else shape.d_model

    def __str__(self) -> str:
        return f"{self.family}.{self.layer}"


def joined(captured: Tensor) -> Float[Tensor, "rows slots dim"]:
    """What `kvprobe.inference.capture` returns for a place, with KV heads side by side."""
    return captured.transpose(1, 2).flatten(2) if captured.dim() == 4 else captured


def asked_at(places: Sequence[Place]) -> dict[str, Any]:
    """What `kvprobe.inference.capture` is to be asked for, so that these places are among what it captures."""
    return {"families": sorted({place.family for place in places}), "layers": [place.layer for place in places]}


def port_of(lanes: Lanes, place: Place) -> Port:
    """The module of the plain model that computes the activations of a place.

    Raises:
        UserError: there is no such layer or family, or no module of its own for it.
    """
    if place.layer >= lanes.geometry.n_layers:
        raise UserError(f"There is no layer {place.layer}; the model has layers 0 to {lanes.geometry.n_layers - 1}.")
    port = plain_ports(lanes, {place.family: [place.layer]})[place.family, place.layer]
    if port is None:
        raise UserError(
            f"{type(lanes.plain).__name__} has no module that computes {place.family!r} alone, so it cannot be "
            "recorded or replaced; choose the residual stream."
        )
    return port
