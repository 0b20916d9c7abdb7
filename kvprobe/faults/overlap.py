"""Pages of K and V that share memory."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.faults.paged import Paged
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck


@dataclass(frozen=True)
class OverlappingKV(Paged):
    """Pages of K and V that share memory, so that the part written last (`last`) is read for both.

    Source: vllm PR #51837, where the K and V halves of a block fell into pages that other layers also wrote. GSM8K was
    0.20 instead of 0.95.
    """

    last: Literal["k", "v"] = "v"

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        if struck.keys.shape != struck.values.shape:
            raise UserError(
                f"Keys have {struck.keys.shape[1]} numbers and values {struck.values.shape[1]}; OverlappingKV needs "
                "equal widths, use another fault for this model."
            )
        return struck.of(self.last)
