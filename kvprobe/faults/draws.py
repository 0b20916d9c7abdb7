"""Where a fault's randomness comes from.

All faults of one sample and repeat share random draws. So a higher rate strikes the slots of a lower one and more, two
faults of one rate strike the same slots, and a band of layers is struck where the whole model would be. Conditions can
therefore be compared slot by slot. What a row draws does not depend on the rows beside it.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastZero, check_fields

_STREAM = 0x6661
"""Separates faults from everything else that is drawn from the same seed and sample."""


@dataclass(frozen=True)
class Draws:
    """One source of random draws.

    Attributes:
        seed: of the study.
        sample: number of the conversation.
        repeat: number of the repetition.
    """

    seed: AtLeastZero = 0
    sample: AtLeastZero = 0
    repeat: AtLeastZero = 0

    def __post_init__(self) -> None:
        check_fields(self)

    def uniform(self, shape: tuple[int, ...], *purpose: int) -> Float[Tensor, "..."]:
        """Numbers from 0 to 1 in float64, so that none are equal; on the CPU. Each `purpose` has draws of its own.

        The tensor is shared with other callers: do not write into it.
        """
        return _drawn(self, "uniform", shape, purpose)

    def normal(self, shape: tuple[int, ...], *purpose: int) -> Float[Tensor, "..."]:
        """Standard normal numbers in float32; on the CPU and shared, as `uniform`."""
        return _drawn(self, "normal", shape, purpose)


@lru_cache(maxsize=16)
def _drawn(draws: Draws, kind: str, shape: tuple[int, ...], purpose: tuple[int, ...]) -> Tensor:
    # Rows of one repeat ask for the same draws one after the other, layer by layer: a small cache serves them all.
    key = np.random.SeedSequence([draws.seed, draws.sample, draws.repeat, _STREAM, *purpose])
    generator = torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))
    if kind == "uniform":
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    return torch.randn(shape, generator=generator)
