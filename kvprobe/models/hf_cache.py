"""The cache object of a Hugging Face model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from kvprobe.cache.parts import Shape, recurrent
from kvprobe.models.recurrent import StateLayer


class CacheLayer(DynamicIndexedLayer):
    """One layer of a Hugging Face cache, with the annotations that transformers leaves out."""

    def __init__(self, parts: Sequence[Tensor] = ()) -> None:
        """A layer that holds these parts, in the order of `held_by`."""
        parent: Any = super()
        parent.__init__()
        if parts:
            self.lazy_initialization(*parts[:2])
            if parts[2:]:
                self.lazy_initialization_indexer(parts[2])
            self.hold(parts)

    def hold(self, parts: Sequence[Tensor]) -> None:
        """Hold these parts in place of its own, which are as many."""
        self.keys, self.values, *index = parts
        if index:
            self.indexer_keys = index[0][:, 0]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        parent: Any = super()
        return parent.update(key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        parent: Any = super()
        return parent.update_indexer(indexer_key_states)


def held_by(layer: Any) -> tuple[Tensor, ...]:
    """What a layer of transformers' cache holds, part by part in the order of `kvprobe.cache.parts`; nothing if it is
    empty. The index, which has no heads there, has one here."""
    if isinstance(layer, StateLayer):
        return layer.stored or ()
    index = getattr(layer, "indexer_keys", None)
    if getattr(layer, "keys", None) is None:
        return ()
    return (layer.keys, layer.values) if index is None else (layer.keys, layer.values, index[:, None])


def empty_layers(shape: Shape) -> list[CacheLayer | StateLayer]:
    """Layers of a Hugging Face cache for a model that stores this, before anything is read."""
    return [StateLayer() if recurrent(part.name for part in parts) else CacheLayer() for parts in shape]


def past_key_values(layers: Sequence[CacheLayer | StateLayer]) -> DynamicCache:
    """A Hugging Face cache made of these layers."""
    past = DynamicCache()
    past.layers = list(layers)  # pyright: ignore[reportAttributeAccessIssue] - it is a plain list
    return past
