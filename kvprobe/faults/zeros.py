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
    """Zeros in place of K and V. A zero key has a score of zero, so the slot still receives attention. With
    `Scope(parts="v")` the slot receives the same attention as before and contributes nothing.

    The zeros of "KV Cache is More Robust Than You Think in Large Language Models" (canarypwn). In engines: a page that
    was allocated and never written.
    """

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        return torch.zeros_like(struck.of(part))
