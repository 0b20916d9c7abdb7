"""Zeroed slots."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck


@dataclass(frozen=True)
class Zeros(Fault):
    """Zeros in place of K and V. A zero key draws a score of zero, not none: the slot still takes attention. With
    `Scope(parts="v")` the slot draws what it always drew and gives nothing for it.

    The "zeros" of seed 001; in engines, a page that was allocated and never written.
    """

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return torch.zeros_like(struck.of(part))
