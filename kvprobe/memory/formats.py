"""The bytes of weights as they are stored, quantised or not."""

from math import prod

from kvprobe.errors import UserError
from kvprobe.memory.config import Config
from kvprobe.memory.numbers import Numbers, plain_named
from kvprobe.memory.weights import Weights

WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model")
"""What configs call the width of the residual stream."""


def dtype_of(config: Config) -> Numbers:
    """The float format that the config names; bfloat16, that of nearly all models, if it names none.

    Raises:
        UserError: it names a format that is not a float.
    """
    for name in ("dtype", "torch_dtype"):
        if config.has(name):
            return plain_named(config.word(name))
    return plain_named("bfloat16")


def weight_bytes(weights: Weights, config: Config, dtype: Numbers, wide: Weights | None = None) -> int:
    """Bytes of all weights: packed with their scales if the config says so, the rest in `dtype`.

    Args:
        wide: those of them that stay in float32 unless they are packed; none by default.

    Raises:
        UserError: they are packed in an unknown way.
    """
    if config.has("compression_config"):
        raise UserError(_unknown(config, "compressed-tensors"))
    kept = Weights() if wide is None else wide
    if not config.has("quantization_config"):
        return _plain(weights.total, kept.total, dtype)
    packing = config.within("quantization_config")
    in_bits = packing.has("load_in_4bit") or packing.has("load_in_8bit")
    method = packing.word("quant_method", default="bitsandbytes") if in_bits else packing.word("quant_method")
    if method == "mxfp4":
        # One byte of scale for 32 numbers of four bits (OCP microscaling formats 1.0).
        return _packed(weights.experts, 4, 32, 8) + _plain(
            weights.total - weights.experts, kept.total - kept.experts, dtype
        )
    matrices = weights.linear + weights.experts
    rest = _plain(weights.total - matrices, kept.total - kept.linear - kept.experts, dtype)
    if method == "fp8":
        return _packed(matrices, 8, _block(packing), 32) + rest
    if method in ("gptq", "awq"):
        bits = packing.size("bits", "w_bit", default=4)
        # Each group has a float16 scale and a packed zero; a group of −1 is a whole column.
        column = -1 in (packing.fields.get("group_size"), packing.fields.get("q_group_size"))
        group = config.size(*WIDTH) if column else packing.size("group_size", "q_group_size", default=128)
        return _packed(matrices, bits, group, 16 + bits) + rest
    if method == "bitsandbytes":
        if packing.flag("load_in_8bit", default=False):
            return matrices + rest
        # Blocks of 64 with a float32 maximum; quantised twice, a maximum takes one byte.
        double = packing.flag("bnb_4bit_use_double_quant", default=False)
        return _packed(matrices, 4, 64, 8 if double else 32) + rest
    if method == "quanto":
        # A scale for each row; of 4 bits, a scale and a shift for each group of 128.
        whole, width = packing.word("weights", default="int8") == "int8", config.size(*WIDTH)
        return (_packed(matrices, 8, width, dtype.bits) if whole else _packed(matrices, 4, 128, 2 * dtype.bits)) + rest
    raise UserError(_unknown(config, method))


def _unknown(config: Config, method: str) -> str:
    known = ("mxfp4", "fp8", "gptq", "awq", "bitsandbytes", "quanto")
    return (
        f"{config.name} has weights packed as {method[:40]!r}, but only {', '.join(known)} are known; give the bytes "
        "of the weights with weights=…."
    )


def _plain(numbers: int, wide: int, dtype: Numbers) -> int:
    """Bytes of numbers that are not packed, so many of which are in float32."""
    return dtype.bytes(numbers - wide) + 4 * wide


def _packed(numbers: int, bits: int, group: int, scale_bits: int) -> int:
    return -(-numbers * bits // 8) + -(-numbers // group) * scale_bits // 8


def _block(packing: Config) -> int:
    """How many numbers share a scale: without a block size a whole matrix does, and its bytes are negligible."""
    if not packing.has("weight_block_size"):
        return 1 << 30
    sides = packing.items("weight_block_size")
    return prod(Config(packing.name, {"weight_block_size": side}).size("weight_block_size") for side in sides)
