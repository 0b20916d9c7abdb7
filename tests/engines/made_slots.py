"""Saved slots as llama.cpp's `state_write` writes them, of arrays: kinds of models of which no tiny one is at hand."""

import struct
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16
Rows = np.ndarray
_GGUF: Any = gguf  # its annotations are incomplete


def a_slot(tokens: Sequence[int], *memories: bytes) -> bytes:
    words = [0xFFFFFFFF, 1, len(tokens), *tokens, 0]
    return b"qsgg" + struct.pack(f"<2I{len(words)}I", 4, len(words), *words) + b"".join(memories)


def attention(
    positions: Sequence[int],
    keys: Sequence[Rows],
    values: Sequence[Rows] = (),
    *,
    transposed: bool = False,
    kind: GGMLQuantizationType = F32,
    streams: int = 1,
    stream: int = 0,
) -> bytes:
    """Keys and values of slots at these positions; transposed: each number of V for all slots."""
    cells = b"".join(struct.pack("<3I", position, 1, stream) for position in positions)
    head = struct.pack("<I", streams) + bytes(4 * stream) + struct.pack("<I", len(positions)) + cells
    written = columns if transposed else rows
    parts = [rows(kind, part) for part in keys] + [written(kind, part) for part in values]
    return b"".join([head, struct.pack("<4I", transposed, len(keys), 0, 0), *parts, bytes(4 * (streams - stream - 1))])


def states(last: int, layers: int, inputs: Sequence[Rows], kept: Sequence[Rows]) -> bytes:
    """Inputs of convolutions, and states, after a token at this position."""
    return struct.pack("<5I", 1, last, 0, 0, layers) + b"".join(rows(F32, part[None]) for part in (*inputs, *kept))


def rows(kind: GGMLQuantizationType, part: Rows) -> bytes:
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    stored = part.astype("<f4" if kind == F32 else "<f2") if per_block == 1 else _GGUF.quantize(part, kind)
    return struct.pack("<iQ", kind, part.shape[1] // per_block * block_bytes) + stored.tobytes()


def columns(kind: GGMLQuantizationType, part: Rows) -> bytes:
    dtype = np.dtype("<f4" if kind == F32 else "<f2")
    return struct.pack("<iII", kind, dtype.itemsize, part.shape[1]) + part.T.astype(dtype).tobytes()
