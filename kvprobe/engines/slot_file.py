"""What a saved slot of llama.cpp holds and where: untrusted input, walked with limits before any of it is read.

A slot is what `llama-server` saves of one conversation: the tokens, then one or more memories. A cache of attention is
one; models with sliding windows have two (the layers that see everything, then those that slide), and hybrid models
one and the states of their recurrent layers. The file does not say which memories follow, so the walk tries all that
may, and takes what ends where the file ends. Context checkpoints, which the server appends for going back, are walked
and left out. Written from llama.cpp's `state_write` and `state_read` of October 2026; other versions are refused.
"""

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from kvprobe.errors import UserError
from kvprobe.files import FileVersion, told
from kvprobe.names import one_line

MAGIC, VERSION = b"qsgg", 4
PACKED, PACKED_VERSION = 0xFFFFFFFF, 1
"""With which the server's list of tokens begins; without it, it is the tokens alone."""
KINDS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0)
"""How numbers may be stored."""
_CHECKPOINTS, _CHECKPOINTS_VERSION = b"SCKP", 1
_MOST_MEMORIES, _MOST_LAYERS, _MOST_STREAMS, _MOST_NUMBERS, _MOST_TURNED = 3, 4096, 256, 2**24, 2**12
"""More of them are taken for damage; numbers are those of a layer in one slot."""
_MOST_FILLED = 64
"""How many times what the file holds its layers may be, with slots that left their windows."""


@dataclass(frozen=True)
class StoredRows:
    """K or V of a layer, or a state, as it lies in the file: for each slot its numbers, or where it is transposed, for
    each number its slots."""

    start: int
    kind: GGMLQuantizationType
    slots: int
    numbers: int
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        return self.slots * row_bytes(self.kind, self.numbers)


@dataclass(frozen=True)
class SlotAttention:
    """A cache of attention.

    Attributes:
        streams: of the cache that it was saved from.
        stream, sequence: which of them it is, and its number among the conversations there.
        positions: of its slots.
        transposed: whether the server keeps V transposed; it reads such slots alone, even where they hold no V.
        keys, values: of each of its layers; no values where attention is latent.
        turned: over how many numbers of a head K, and V, were multiplied with a Hadamard matrix before they were
            quantised; 0 for not.
    """

    streams: int
    stream: int
    sequence: int
    positions: tuple[int, ...]
    transposed: bool
    keys: tuple[StoredRows, ...]
    values: tuple[StoredRows, ...]
    turned: tuple[int, int]


@dataclass(frozen=True)
class States:
    """The states of recurrent layers after the last token.

    Attributes:
        positions: of the last token.
        layers: of the model, of all kinds.
        inputs: of the short convolution of each recurrent layer.
        states: of each of these; of no numbers where a layer has the convolution alone.
    """

    positions: tuple[int, ...]
    layers: int
    inputs: tuple[StoredRows, ...]
    states: tuple[StoredRows, ...]


Memory = SlotAttention | States


@dataclass(frozen=True)
class Slot:
    """A saved slot.

    Attributes:
        tokens: that it holds, one for each position.
        packed: whether the list of tokens is as the server writes it, or plain.
        memories: see above.
        checkpoints: how many follow that are left out.
        version: of the file, of which no other one is read.
    """

    path: Path
    tokens: tuple[int, ...]
    packed: bool
    memories: tuple[Memory, ...]
    checkpoints: int
    version: FileVersion = field(repr=False, compare=False)

    @property
    def attention(self) -> tuple[SlotAttention, ...]:
        return tuple(memory for memory in self.memories if isinstance(memory, SlotAttention))

    def bytes_of(self, rows: StoredRows) -> np.ndarray:
        """The bytes of each slot, or of each number where they are transposed; read when they are looked at.

        Raises:
            UserError: the file was written again.
        """
        self.version.refuse_another()
        lines = rows.numbers if rows.transposed else rows.slots
        if not rows.nbytes:
            return np.zeros((lines, 0), np.uint8)
        return np.memmap(self.path, np.uint8, "r", rows.start, (lines, rows.nbytes // lines))


def row_bytes(kind: GGMLQuantizationType, numbers: int) -> int:
    """Bytes of so many numbers, stored like this."""
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    return numbers // per_block * block_bytes


def is_slot(path: Path) -> bool:
    """Whether a file begins as a saved slot of llama.cpp does."""
    with told(path), path.open("rb") as file:
        return file.read(4) == MAGIC


def read_slot(path: Path) -> Slot:
    """What a saved slot holds, by its beginning; its numbers stay in the file.

    Raises:
        UserError: the file is damaged, or of a version, model or cache type that kvprobe does not know.
    """
    if not path.is_file():
        raise UserError(f"There is no saved slot at {path}; check the path.")
    try:
        version = FileVersion.of(path)
        with told(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _SlotWalk(version, data).slot()
    except (ValueError, struct.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path.name} is not a saved slot of llama.cpp that kvprobe can read ({one_line(error)}); save it again."
        ) from error


class _Misfit(ValueError):
    """What follows is not what it was taken for."""


class _SlotWalk:
    """Reads a file from its beginning. Each length is compared with the bytes that are left."""

    def __init__(self, version: FileVersion, data: mmap.mmap) -> None:
        self.version, self.data, self.at = version, data, 0
        self.reason = ""

    def slot(self) -> Slot:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with 'qsgg'")
        self.at = 4
        if (version := self.number()) != VERSION:
            raise ValueError(f"it is of version {version}, but kvprobe reads {VERSION}")
        tokens, packed = self.tokens()
        readings = list(self.memories(self.at))
        if not readings:
            raise ValueError(self.reason or "it holds no memory")
        if len(readings) > 1:
            raise ValueError("it can be read in more than one way")
        memories, checkpoints = readings[0]
        for memory in memories:
            if any(not 0 <= position < len(tokens) for position in memory.positions):
                raise ValueError(f"it holds positions beyond its {len(tokens)} tokens")
            if len(set(memory.positions)) < len(memory.positions):
                raise ValueError("slots of it share a position")
        self.refuse_few([memory for memory in memories if isinstance(memory, SlotAttention)])
        return Slot(self.version.path, tokens, packed, memories, checkpoints, self.version)

    def refuse_few(self, memories: Sequence[SlotAttention]) -> None:
        """Refuse memories that would fill far more than they hold, since each layer has all positions."""
        positions = len({position for memory in memories for position in memory.positions})
        numbers = [sum(rows.numbers for rows in (*memory.keys, *memory.values)) for memory in memories]
        held = sum(len(memory.positions) * size for memory, size in zip(memories, numbers, strict=True))
        if positions * sum(numbers) > _MOST_FILLED * held:
            raise ValueError(f"layers of it hold few of its {positions:,} positions")

    def tokens(self) -> tuple[tuple[int, ...], bool]:
        """The tokens, and whether they are written as the server writes them."""
        words = self.words(self.count(4))
        packed = len(words) > 0 and int(words[0]) == PACKED
        if packed:
            if len(words) < 4 or int(words[1]) != PACKED_VERSION or int(words[2]) != len(words) - 4:
                raise ValueError("its list of tokens is of another version, or cut")
            if words[-1]:
                raise ValueError("it holds images or sound, which kvprobe cannot read")
            words = words[3:-1]
        if len(words) and int(words.max()) > 2**31 - 1:
            raise ValueError("it holds a token below zero")
        return tuple(map(int, words)), packed

    def memories(self, at: int, before: tuple[Memory, ...] = ()) -> Iterator[tuple[tuple[Memory, ...], int]]:
        """All ways to read the file from a place to its end, with the checkpoints there."""
        if before and (at == len(self.data) or self.data[at : at + 4] == _CHECKPOINTS):
            self.at = at
            yield before, self.checkpoints()
            return
        if len(before) == _MOST_MEMORIES:
            return
        kinds: tuple[Callable[[], Memory], ...] = (
            lambda: self.attention(with_values=True),
            lambda: self.attention(with_values=False),
            self.states,
        )
        for kind in kinds:
            self.at = at
            try:
                memory = kind()
            except _Misfit as error:
                self.reason = self.reason or str(error)
            else:
                yield from self.memories(self.at, (*before, memory))

    def attention(self, *, with_values: bool) -> SlotAttention:
        streams = self.number()
        if not 1 <= streams <= _MOST_STREAMS:
            raise _Misfit(f"it says that it has {streams:,} streams")
        held = [memory for stream in range(streams) if (memory := self.stream(streams, stream, with_values))]
        if len(held) != 1:
            raise _Misfit(f"{len(held)} of its streams hold slots, but a conversation is in one of them")
        return held[0]

    def stream(self, streams: int, stream: int, with_values: bool) -> SlotAttention | None:
        """A stream; None where it is empty."""
        slots = self.count(12, fits=True)
        if not slots:
            return None
        cells = self.words(3 * slots).reshape(slots, 3)
        if not (cells[:, 1] == 1).all() or not (cells[:, 2] == cells[0, 2]).all():
            raise _Misfit("its slots belong to none or several conversations, or have positions in two dimensions")
        transposed, layers, *turned = (self.number() for _ in range(4))
        if transposed > 1 or not 1 <= layers <= _MOST_LAYERS:
            raise _Misfit(f"it says that it has {layers:,} layers")
        if any(width and (width & (width - 1) or width > _MOST_TURNED) for width in turned):
            raise _Misfit("its numbers are turned in a way that kvprobe does not know")
        keys = tuple(self.rows(slots) for _ in range(layers))
        read = self.columns if transposed else self.rows
        values = tuple(read(slots) for _ in range(layers)) if with_values else ()
        if not all(rows.numbers for rows in (*keys, *values)):
            raise _Misfit("a layer of it holds no numbers")
        positions, sequence = tuple(map(int, cells[:, 0])), int(cells[0, 2])
        return SlotAttention(
            streams, stream, sequence, positions, bool(transposed), keys, values, (turned[0], turned[1])
        )

    def rows(self, slots: int) -> StoredRows:
        kind, nbytes = self.kind(), self.number("<Q")
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        if nbytes % block_bytes:
            raise _Misfit(f"{nbytes:,} bytes are no whole numbers in {kind.name}")
        return self.skipped(StoredRows(self.at, kind, slots, nbytes // block_bytes * per_block))

    def columns(self, slots: int) -> StoredRows:
        kind, nbytes, numbers = self.kind(), self.number(), self.number()
        if GGML_QUANT_SIZES[kind] != (1, nbytes):
            raise _Misfit(f"its transposed numbers take {nbytes:,} bytes each")
        return self.skipped(StoredRows(self.at, kind, slots, numbers, transposed=True))

    def states(self) -> States:
        cells = self.words(2 * self.count(8, fits=True)).reshape(-1, 2)
        if not len(cells) or cells[:, 1].any():
            raise _Misfit("it holds no state")
        transposed, layers = self.number(), self.number()
        if transposed or not 1 <= layers <= _MOST_LAYERS:
            raise _Misfit(f"it says that it has {layers:,} layers")
        inputs = self.alike(len(cells), 2 * layers)
        states = self.alike(len(cells), len(inputs))
        if not states:  # both are of one size
            half = len(inputs) // 2
            inputs, states = inputs[:half], inputs[half:]
        if not inputs or len(states) != len(inputs):
            raise _Misfit(f"it holds {len(inputs)} inputs of convolutions, but {len(states)} states")
        return States(tuple(map(int, cells[:, 0])), layers, inputs, states)

    def alike(self, slots: int, most: int) -> tuple[StoredRows, ...]:
        """As many rows in float32 and of one size as follow."""
        found: list[StoredRows] = []
        while len(found) < most:
            at = self.at
            try:
                rows = self.rows(slots)
            except _Misfit:
                rows = None
            if rows is None or rows.kind != KINDS[0] or (found and rows.numbers != found[0].numbers):
                self.at = at
                break
            found.append(rows)
        return tuple(found)

    def checkpoints(self) -> int:
        if self.at == len(self.data):
            return 0
        self.at += 4
        if (version := self.number()) != _CHECKPOINTS_VERSION:
            raise ValueError(f"its checkpoints are of version {version}, but kvprobe knows {_CHECKPOINTS_VERSION}")
        count = self.count(40)
        for _ in range(count):
            self.at += 16
            for _ in range(3):
                length = self.number("<Q")
                if length > len(self.data) - self.at:
                    raise ValueError(f"its checkpoints end after the file, at byte {self.at + length:,}")
                self.at += length
        if self.at != len(self.data):
            raise ValueError(f"{len(self.data) - self.at:,} bytes follow its checkpoints")
        return count

    def kind(self) -> GGMLQuantizationType:
        number = self.number("<i")
        if number not in KINDS:
            raise _Misfit(
                f"its cache is of type {number}, or what follows is not known; kvprobe reads caches in f32, f16, q8_0 "
                "and q4_0"
            )
        return GGMLQuantizationType(number)

    def skipped(self, rows: StoredRows) -> StoredRows:
        if rows.numbers > _MOST_NUMBERS or rows.nbytes > len(self.data) - self.at:
            raise _Misfit(
                f"a layer of it would end at byte {self.at + rows.nbytes:,}, and the file at {len(self.data):,}"
            )
        self.at += rows.nbytes
        return rows

    def count(self, width: int, fits: bool = False) -> int:
        """How many things of at least `width` bytes follow."""
        count = self.number()
        if count > (len(self.data) - self.at) // width:
            sentence = f"it says that {count:,} entries follow byte {self.at:,}, and it ends at {len(self.data):,}"
            raise _Misfit(sentence) if fits else ValueError(sentence)
        return count

    def words(self, count: int) -> np.ndarray:
        self.at += 4 * count
        return np.frombuffer(self.data[self.at - 4 * count : self.at], "<u4")

    def number(self, form: str = "<I") -> int:
        try:
            (number,) = struct.unpack_from(form, self.data, self.at)
        except struct.error as error:
            raise _Misfit(f"it ends early, at byte {len(self.data):,}") from error
        self.at += struct.calcsize(form)
        return number
