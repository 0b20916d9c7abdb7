"""The cache object of a Hugging Face model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


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


def past_key_values(layers: Sequence[CacheLayer]) -> DynamicCache:
    """A Hugging Face cache made of these layers."""
    past = DynamicCache()
    past.layers = list(layers)  # pyright: ignore[reportAttributeAccessIssue] - it is a plain list
    return past
