"""The entries of a vector as Python numbers."""

from typing import Any, TypeVar

from jaxtyping import Shaped
from torch import Tensor

Number = TypeVar("Number", bool, int, float)


def entries(vector: Shaped[Tensor, "entries"], kind: type[Number]) -> tuple[Number, ...]:
    """The entries of a vector, which are of this kind."""
    untyped: Any = vector  # torch does not say what `tolist` returns
    return tuple(untyped.tolist())
