"""Indices into an axis of a cache, as users give them."""

from operator import index
from typing import Any

from kvprobe.errors import UserError


def indices(kind: str, chosen: Any, count: int) -> list[int]:
    """The chosen whole numbers as a list, all of them for None; those outside `count` are refused."""
    numbers = [*range(count)] if chosen is None else [index(number) for number in chosen]
    for number in numbers:
        if not 0 <= number < count:
            raise UserError(f"There is no {kind} {number}; the cache has {kind}s 0 to {count - 1}.")
    return numbers
