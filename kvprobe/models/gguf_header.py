"""What a GGUF file says that it holds: untrusted input, walked with limits before a library reads any of it."""

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.names import one_line

_GGUF: Any = gguf  # its annotations are incomplete

_MAX_ITEMS = 2**22
"""Entries of a list, such as a vocabulary; the largest of today's have a quarter of a million."""

_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Stored:
    """A tensor of a GGUF file, as it lies there.

    Attributes:
        shape: in torch's order.
        kind: how its numbers are stored.
        start: of its bytes in the file.
    """

    path: Path
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int

    @property
    def numbers(self) -> int:
        """How many it holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The metadata and tensors of a GGUF file, or of all parts of a split one."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def numbers(self) -> int:
        """How many its tensors hold."""
        return sum(tensor.numbers for tensor in self.tensors.values())

    def floats(self, name: str) -> Tensor:
        """A tensor in float32.

        Raises:
            UserError: its numbers are stored in a way that kvprobe does not know.
        """
        stored = self.tensors[name]
        data = np.memmap(stored.path, np.uint8, "r", stored.start, (stored.nbytes,))
        try:
            numbers = _GGUF.dequantize(data.reshape(*stored.shape[:-1], -1), stored.kind)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path.name} stores {name!r} as {stored.kind.name}, which kvprobe cannot read; give another "
                "quantisation, or the model's folder of safetensors."
            ) from error
        return torch.tensor(np.array(numbers, dtype=np.float32).reshape(stored.shape))


def parts_of(path: Path) -> list[Path]:
    """The file, or all parts of the split file that it is a part of by its name.

    Raises:
        UserError: one of them is not there.
    """
    if not path.is_file():
        raise UserError(f"There is no GGUF file at {path}; check the path.")
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named[1], int(named[3])
    parts = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    absent = next((part.name for part in parts if not part.is_file()), None)
    if absent or path not in parts:
        raise UserError(
            f"{path.name} is one of {count} parts of a model, and {absent or 'the part of that number'} is not beside "
            "it; put all parts into one folder."
        )
    return parts


def read_header(parts: list[Path]) -> Header:
    """The header of a GGUF file; the parts of a split one are joined.

    Raises:
        UserError: a file is damaged or not whole, or the parts are not those of one model.
    """
    headers = [_read(part) for part in parts]
    first = headers[0]
    count, total = (
        first.metadata.get(f"split.{key}", default) for key, default in (("count", 1), ("tensors.count", 0))
    )
    if count in (0, 1) and len(parts) == 1:
        return first
    if count != len(parts):
        raise UserError(
            f"{first.path.name} is of a model in {count} parts, but its name is that of {len(parts)}; name them as "
            "llama.cpp does, MODEL-00001-of-00003.gguf, all in one folder."
        )
    tensors: dict[str, Stored] = {}
    for number, header in enumerate(headers):
        same = all(
            header.metadata.get(key, value) == value
            for key, value in first.metadata.items()
            if key not in ("split.no", "general.alignment")
        )
        if not same or header.metadata.get("split.no") != number or tensors.keys() & header.tensors.keys():
            raise UserError(
                f"{header.path.name} does not say that it is part {number + 1} of the {count} of {first.path.name}; "
                "fetch all parts of one model."
            )
        tensors |= header.tensors
    if len(tensors) != total:
        raise UserError(
            f"The {count} parts of {first.path.name} hold {len(tensors)} tensors, but its header says {total}; fetch "
            "all parts of one model."
        )
    return Header(first.path, first.metadata, tensors)


def _read(path: Path) -> Header:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(path, data).header()
    # Of a file that is empty, ends early, or holds bytes that are not text or numbers of no known kind.
    except (ValueError, KeyError, struct.error) as error:
        raise UserError(f"{path.name} is not a GGUF file that is whole ({one_line(error)}); fetch it again.") from error


class _Walk:
    """Reads a header from its beginning. Each length is compared with the bytes that are left."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        self.at = 4
        version = self.number("<I")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}, but kvprobe reads 2 and 3")
        n_tensors, n_entries = self.count(24), self.count(13)
        metadata: dict[str, object] = {}
        for _ in range(n_entries):
            key = self.string()
            if key in metadata:
                raise ValueError(f"it has {key[:60]!r} twice")
            metadata[key] = self.value(self.number("<I"))
        described = [self.tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
            raise ValueError(f"its alignment is {alignment!r:.40}")
        return Header(self.path, metadata, self.tiled(described, alignment))

    def tiled(
        self, described: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]], alignment: int
    ) -> dict[str, Stored]:
        """The tensors, which must fill the rest of the file without gaps."""
        tensors: dict[str, Stored] = {}
        end = begin = -(-self.at // alignment) * alignment
        last = begin
        for name, shape, kind, offset, nbytes in sorted(described, key=lambda tensor: tensor[3]):
            if name in tensors:
                raise ValueError(f"it has the tensor {name[:60]!r} twice")
            if begin + offset != end:
                raise ValueError(f"the numbers of {name[:60]!r} do not begin where those before it end")
            tensors[name] = Stored(self.path, shape, kind, end, nbytes)
            last = end + nbytes
            end = -(-last // alignment) * alignment
        if not last <= len(self.data) <= end:
            raise ValueError(f"its tensors end at byte {last:,}, and the file at {len(self.data):,}")
        return {name: tensors[name] for name, *_ in described}

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        """Name, shape, kind, offset and number of bytes of the next tensor."""
        name, n_dims = self.string(), self.number("<I")
        if not 1 <= n_dims <= 4:
            raise ValueError(f"{name[:60]!r} has {n_dims} dimensions")
        shape = tuple(int(self.number("<Q")) for _ in range(int(n_dims)))[::-1]
        kind = GGMLQuantizationType(self.number("<I"))
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block or not prod(shape):
            raise ValueError(f"{name[:60]!r} cannot be of shape {shape} in {kind.name}")
        return name, shape, kind, int(self.number("<Q")), prod(shape) // per_block * block_bytes

    def value(self, kind: int | float) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _LIST:
            if kind not in _FORMATS:
                raise ValueError(f"it has a value of kind {kind}")
            return self.number(_FORMATS[int(kind)])
        kind = self.number("<I")
        if kind == _STRING:
            return [self.string() for _ in range(self.count(8))]
        if kind not in _FORMATS:
            raise ValueError(f"it has a list of kind {kind}")
        width = struct.calcsize(_FORMATS[int(kind)])
        count = self.count(width)
        self.at += count * width
        return list(struct.unpack_from(f"<{count}{_FORMATS[int(kind)][1]}", self.data, self.at - count * width))

    def count(self, width: int) -> int:
        """How many things of at least `width` bytes follow."""
        count = int(self.number("<Q"))
        if count > min(_MAX_ITEMS, (len(self.data) - self.at) // width):
            raise ValueError(f"it says that {count:,} entries follow byte {self.at:,}")
        return count

    def string(self) -> str:
        length = int(self.number("<Q"))
        if length > len(self.data) - self.at:
            raise ValueError(f"it says that a text of {length:,} bytes follows byte {self.at:,}")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def number(self, form: str) -> int | float:
        (number,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return number
