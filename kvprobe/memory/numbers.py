"""The formats in which the numbers of a cache or of weights are stored."""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.names import unknown


@dataclass(frozen=True)
class Numbers:
    """A format that cached numbers are stored in.

    Attributes:
        name: as in the engines.
        bits: of a number.
        engines: which engines store it; the logical view counts the bits of any format.
    """

    name: str
    bits: int
    engines: tuple[str, ...] = ("hf", "vllm")

    @property
    def is_plain(self) -> bool:
        """Whether the numbers are floats as a model computes them."""
        return self.name in PLAIN

    def bytes(self, count: int) -> int:
        """Bytes of so many numbers, packed, without scales."""
        return -(-count * self.bits // 8)


PLAIN = ("float32", "bfloat16", "float16")

_KNOWN = (
    Numbers("float32", 32),
    Numbers("bfloat16", 16),
    Numbers("float16", 16),
    Numbers("fp8", 8),
    Numbers("int4", 4, ("hf",)),
    Numbers("int2", 2, ("hf",)),
    Numbers("int8_per_token_head", 8, ("vllm",)),
    Numbers("int4_per_token_head", 4, ("vllm",)),
    Numbers("nvfp4", 4, ("vllm",)),
    Numbers("fp8_ds_mla", 8, ("vllm",)),
)

FORMATS = {numbers.name: numbers for numbers in _KNOWN}

_SHORT = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}


def numbers_named(name: str) -> Numbers:
    """The format of this name.

    Raises:
        UserError: there is none.
    """
    full = _SHORT.get(name, name)
    if full not in FORMATS:
        raise UserError(unknown("dtype of numbers", name, FORMATS))
    return FORMATS[full]


def plain_named(name: str) -> Numbers:
    """The float format of this name, as weights and activations have.

    Raises:
        UserError: there is none.
    """
    full = _SHORT.get(name.removeprefix("torch."), name.removeprefix("torch."))
    if full not in PLAIN:
        raise UserError(unknown("dtype of weights", name, PLAIN))
    return FORMATS[full]
