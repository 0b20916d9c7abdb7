"""The cache object of a Hugging Face model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvprobe.cache.parts import Shape, recurrent
from kvprobe.models.recurrent import StateLayer


class CacheLayer(DynamicLayer):
    """One layer of a Hugging Face cache, with the annotations that transformers leaves out."""

    def __init__(self) -> None:
        parent: Any = super()
        parent.__init__()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        parent: Any = super()
        return parent.update(key_states, value_states)


def empty_layers(shape: Shape) -> list[CacheLayer | StateLayer]:
    """Layers of a Hugging Face cache for a model that stores this, before anything is read."""
    return [StateLayer() if recurrent(part.name for part in parts) else CacheLayer() for parts in shape]


def past_key_values(layers: Sequence[CacheLayer | StateLayer]) -> DynamicCache:
    """A Hugging Face cache made of these layers."""
    past = DynamicCache()
    past.layers = list(layers)  # pyright: ignore[reportAttributeAccessIssue] - it is a plain list
    return past
