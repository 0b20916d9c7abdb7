"""Indices into an axis of a cache, as users give them."""

from typing import Any

import torch

from kvprobe.errors import UserError


def indices(kind: str, chosen: Any, count: int) -> list[int]:
    """The chosen whole numbers as a list, all of them for None; those outside `count` are refused."""
    given: Any = torch.arange(count) if chosen is None else torch.as_tensor(chosen)
    numbers: list[int] = given.tolist()
    for index in numbers:
        if not 0 <= index < count:
            raise UserError(f"There is no {kind} {index}; the cache has {kind}s 0 to {count - 1}.")
    return numbers
