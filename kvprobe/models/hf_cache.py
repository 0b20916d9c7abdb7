"""The cache object of a Hugging Face model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache, __version__
from transformers.cache_utils import CacheLayerMixin, DummyLayer, DynamicIndexedLayer, LinearAttentionCacheLayerMixin

from kvprobe.cache.parts import attends, recurrent
from kvprobe.models.recurrent import StateLayer

CACHE = "cache" if tuple(map(int, __version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""The argument by which models of this release take a cache."""


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


class BothLayer:
    """One layer of a Hugging Face cache that attends and keeps a state (Falcon-H1)."""

    def __init__(self, slots: Any, state: Any) -> None:
        self.of_slots, self.of_state = slots, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_state if hasattr(self.of_state, name) else self.of_slots, name)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return (*(self.of_slots.stored or ()), *(self.of_state.stored or ()))

    @property
    def picked(self) -> tuple[Tensor, ...]:
        return (*self.of_slots.picked, *self.of_state.picked)


class IdleLayer(DummyLayer):
    """A layer that stores nothing (Nemotron-H)."""

    stored, picked = (), ()


CacheLayerMixin.register(BothLayer)
LinearAttentionCacheLayerMixin.register(BothLayer)


def held_by(layer: Any) -> tuple[Tensor, ...]:
    """What a layer of transformers' cache holds, part by part in the order of `kvprobe.cache.parts`; nothing if it is
    empty. The index, which has no heads there, has one here."""
    if isinstance(layer, BothLayer):
        return (*held_by(layer.of_slots), *held_by(layer.of_state))
    if isinstance(layer, StateLayer):
        return layer.stored or ()
    index = getattr(layer, "indexer_keys", None)
    if getattr(layer, "keys", None) is None:
        return ()
    return (layer.keys, layer.values) if index is None else (layer.keys, layer.values, index[:, None])


def layers_of(parts: Iterable[Sequence[str]], slots: Callable[[int], Any], state: Callable[[int], Any]) -> list[Any]:
    """Layers of a Hugging Face cache.

    Args:
        parts: the names of what each layer stores.
        slots: makes the one that holds the slots of the layer of this number.
        state: makes the one that holds its state.
    """

    def layer(number: int, names: Sequence[str]) -> Any:
        if recurrent(names):
            return BothLayer(slots(number), state(number)) if attends(names) else state(number)
        return slots(number) if attends(names) else IdleLayer()

    return [layer(number, names) for number, names in enumerate(parts)]


def empty_layers(parts: Iterable[Sequence[str]]) -> list[Any]:
    """Layers of a Hugging Face cache before anything is read; see `layers_of`."""
    return layers_of(parts, lambda _: CacheLayer(), lambda _: StateLayer())


class StatesAlone(DynamicCache):
    """A Hugging Face cache of which no layer attends. transformers asks it for the length of one that does, for a mask
    that kvprobe gives itself."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


def library_cache(config: Any) -> DynamicCache:
    """transformers' own cache for a model of this config."""
    past = DynamicCache(config=config)
    attends = not past.layers or any(isinstance(layer, CacheLayerMixin) for layer in past.layers)
    return past if attends else StatesAlone(config=config)


def past_key_values(layers: Sequence[Any]) -> DynamicCache:
    """A Hugging Face cache made of these layers."""
    past = DynamicCache() if any(isinstance(layer, CacheLayerMixin) for layer in layers) else StatesAlone()
    past.layers = list(layers)  # pyright: ignore[reportAttributeAccessIssue] - it is a plain list
    return past
