"""The cache object of a Hugging Face model."""

from collections.abc import Sequence

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def past_key_values(layers: Sequence[DynamicLayer]) -> DynamicCache:
    """A Hugging Face cache made of these layers."""
    past = DynamicCache()
    past.layers = list(layers)  # pyright: ignore[reportAttributeAccessIssue] - it is a plain list
    return past
