"""Numbers stored at too low a precision, or read at the wrong scale."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastOne, Within
from kvprobe.cache.ledger import QuantisationFormat
from kvprobe.cache.precision import Fp8Format
from kvprobe.errors import UserError
from kvprobe.faults.fault import Fault
from kvprobe.faults.scope import Part
from kvprobe.faults.struck import Struck
from kvprobe.policies.codes import codes_of_values

_WHOSE_SCALE = 61
_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _largest(struck: Struck, part: Part) -> float:
    """The largest absolute number of the layer's clean K or V, from which engines calibrate one scale for all."""
    return float(struck.context.vectors(struck.layer, part).float().abs().max().clamp(min=1e-30))


def _in_fp8(vectors: Float[Tensor, "struck d"], scale: float, kind: Fp8Format) -> Float[Tensor, "struck d"]:
    """Divided by the scale and rounded to what fp8 can hold, numbers beyond it saturated."""
    dtype = _FORMATS[kind]
    limit = torch.finfo(dtype).max
    return (vectors.float() / scale).clamp(-limit, limit).to(dtype).float()


@dataclass(frozen=True)
class Fp8Scale(Fault):
    """Stored in fp8 at one scale for each layer and part, and read back at `factor` times that scale. A factor of 1 is
    fp8 without an error.

    Source: sglang PR #20705, where scales were loaded and then ignored, so that 1.0 was used instead.
    """

    factor: float
    kind: Fp8Format = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, self.factor, "factor", self.kind)

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        scale = _largest(struck, part) / torch.finfo(_FORMATS[self.kind]).max
        return _in_fp8(struck.of(part), scale, self.kind) * scale * self.factor


@dataclass(frozen=True)
class Fp8Saturation(Fault):
    """Stored in fp8 at a scale at which all numbers above `room` times the layer's largest saturate.

    Source: vllm #41343, where default scales did not fit a model. (vllm #13133, often cited for this, was an fp8
    setting that a backend ignored.)
    """

    room: float
    kind: Fp8Format = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, self.room, "room", self.kind)

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        scale = self.room * _largest(struck, part) / torch.finfo(_FORMATS[self.kind]).max
        return _in_fp8(struck.of(part), scale, self.kind) * scale


@dataclass(frozen=True)
class QuantisationNoise(Fault):
    """Each struck vector rounded to `bits` per number, in groups of `group` channels with a scale and minimum of their
    own.

    Quantised caches do this to every slot; struck slot by slot, it shows which slots tolerate it. See
    `policies.Quantise` for the layout of "KIVI".
    """

    bits: Annotated[int, Within(1, 8)]
    group: AtLeastOne = 32

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        vectors = struck.of(part)
        return codes_of_values(vectors[None, :, None], QuantisationFormat(self.bits, self.group)).numbers()[0, :, 0]


@dataclass(frozen=True)
class ForeignScales(Fault):
    """Stored in int8 with a scale for each slot and head, and read back with the scale of another slot of the prompt.

    Source: vllm #49716, where scales were looked up at places of blocks that others occupied once the pool was full;
    vllm #50702 reports the same symptoms after that was fixed.
    """

    def damaged(self, struck: Struck, part: Part) -> Float[Tensor, "struck d"]:
        scales = struck.context.vectors(struck.layer, part).float().abs().amax(-1) / 127
        count = scales.shape[1]
        others = (struck.slots + 1 + (struck.uniform(_WHOSE_SCALE)[:, 0] * max(1, count - 1)).long()) % count
        vectors = struck.of(part).float()
        own = (vectors.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        return (vectors / own).round() * scales[struck.heads, others][:, None]


def _check(fault: Fault, value: float, name: str, kind: str) -> None:
    if value <= 0:
        raise UserError(f"{type(fault).__name__} has {name}={value}; it must be above 0.")
