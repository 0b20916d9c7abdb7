"""NaN and infinity."""

from dataclasses import dataclass
from typing import SupportsFloat

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck


@dataclass(frozen=True)
class NotANumber(Fault):
    """NaN in place of K and V, or infinity (`value`).

    NaN in slots past the length: flash-attention #1745, vllm PR #53856. A NaN in V spreads even from a masked slot,
    because 0 × NaN is NaN.
    """

    value: SupportsFloat = float("nan")

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return torch.full_like(struck.of(part), float(self.value))
