"""Indices into an axis of a cache, as users give them."""

from typing import Any

from kvprobe.checks import whole_numbers
from kvprobe.errors import UserError


def indices(kind: str, chosen: Any, count: int) -> list[int]:
    """The chosen indices as a list, all of them for None; anything but whole numbers below `count` is refused."""
    if chosen is None:
        return list(range(count))
    numbers = whole_numbers(chosen)
    if numbers is None:
        raise UserError(f"{str(chosen)[:40]!r} is not a list of {kind}s; give whole numbers, such as [0, 1].")
    for index in numbers:
        if not 0 <= index < count:
            raise UserError(f"There is no {kind} {index}; the cache has {kind}s 0 to {count - 1}.")
    return list(numbers)
