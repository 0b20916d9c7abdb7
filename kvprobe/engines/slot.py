"""Saved slots of llama.cpp as caches, and caches as saved slots.

The file holds numbers, not what they mean: a `SlotLayout` says how many heads a layer has, in which order a head's
channels lie, and which layers are in which memory. `kvprobe.engines.llamacpp` takes it from the model. Without it each
layer is one wide head, as it lies in the file.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.computed import engine_in
from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.stored import LazyLayers, StoredCache
from kvprobe.cache.visibility import refuse_dropped_within
from kvprobe.engines.slot_file import (
    MAGIC,
    PACKED,
    PACKED_VERSION,
    VERSION,
    Slot,
    SlotAttention,
    States,
    StoredRows,
    read_slot,
    row_bytes,
)
from kvprobe.errors import UserError
from kvprobe.files import replacing

__all__ = ["Slot", "SlotLayout", "read_slot", "stored", "write_slot"]
_GGUF: Any = gguf  # its annotations are incomplete
_NUMPY = {GGMLQuantizationType.F32: np.dtype("<f4"), GGMLQuantizationType.F16: np.dtype("<f2")}
_FILLER = 0
"""Token of a position of which neither the cache nor the file holds one."""


@dataclass(frozen=True)
class SlotLayout:
    """What the file of a slot does not hold of its model.

    Attributes:
        layers: how many it has.
        heads: KV heads of each.
        memories: for each cache of attention in the file, the layers that are in it, in order.
        recurrent: layers that keep states.
        paired: how many numbers of a key are rotated as neighbours, (0, 1), (2, 3) …, and were brought there from
            pairs that are half of these numbers apart; 0 for none.
        rope: numbers of the rotated key of latent attention, which come first; 0 where it is not latent.
        numbers: of each head; 0 where that is not known.
        windows: of the layers that slide; none where that is not known.
    """

    layers: int
    heads: tuple[int, ...]
    memories: tuple[tuple[int, ...], ...]
    recurrent: tuple[int, ...] = ()
    paired: int = 0
    rope: int = 0
    numbers: int = 0
    windows: tuple[int, ...] = ()

    @classmethod
    def of(cls, slot: Slot) -> "SlotLayout":
        """That of a slot of an unknown model: its layers as they come, with one head each.

        Raises:
            UserError: attention is latent, so that it is not known which part of it is rotated.
        """
        counts = [len(memory.keys) for memory in slot.attention]
        if not counts:
            raise UserError(f"{slot.path.name} holds states alone, of which no cache can be made.")
        if not all(memory.values for memory in slot.attention):
            raise UserError(
                f"{slot.path.name} holds latent attention, of which it does not say what is rotated; give its model."
            )
        ends = np.cumsum(counts).tolist()
        memories = tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))
        return cls(sum(counts), (1,) * sum(counts), memories)

    def refuse_other(self, slot: Slot) -> None:
        """Refuse a slot that does not hold these layers in this size.

        Raises:
            UserError: it holds others.
        """
        counts = [len(memory.keys) for memory in slot.attention]
        if counts != [*map(len, self.memories)]:
            raise UserError(
                f"{slot.path.name} holds caches of {' and '.join(map(str, counts))} layers, but the model needs "
                f"{' and '.join(str(len(layers)) for layers in self.memories)}; give the model that made it."
            )
        for memory, layers in zip(slot.attention, self.memories, strict=True):
            if bool(memory.values) == bool(self.rope):
                raise UserError(
                    f"{slot.path.name} holds {'K and V' if memory.values else 'latent attention'}, and the model does "
                    "not; give the model that made it."
                )
            for number, rows in zip((*layers, *layers), (*memory.keys, *memory.values), strict=False):
                numbers, rest = divmod(rows.numbers, self.heads[number])
                if rest or numbers < max(self.paired, self.rope) or (self.numbers and numbers != self.numbers):
                    raise UserError(
                        f"Layer {number} of {slot.path.name} holds {rows.numbers} numbers, which are not of "
                        f"{self.heads[number]} heads of this model; give the model that made it."
                    )


def stored(slot: Slot, layout: SlotLayout | None = None) -> StoredCache:
    """A saved slot as a cache of which a layer is read when it is asked for.

    Raises:
        UserError: the slot is not of this layout, or see `SlotLayout.of`.
    """
    known = layout or SlotLayout.of(slot)
    known.refuse_other(slot)
    positions = _positions(slot)
    names = [rows.kind.name.lower() for memory in slot.attention for rows in (memory.keys[0], *memory.values[:1])]
    origin = f"a slot of llama.cpp, K and V in {' and '.join(dict.fromkeys(names))}"
    lacks: list[str] = []
    if layout is None:
        lacks.append(
            "how many heads a layer has, in which order their channels lie, and which layers of its model are here"
        )
    absent = len(positions) * len(slot.attention) - sum(len(memory.positions) for memory in slot.attention)
    if absent:
        lacks.append("slots that left the windows of its sliding layers, where they are not live")
    count = sum(len(memory.inputs) for memory in slot.memories if isinstance(memory, States))
    if count:
        lacks.append(
            f"what each token wrote into the states of {count} recurrent layers, which it holds as they are now"
        )
    return StoredCache(
        LazyLayers(known.layers, lambda number: _layer(slot, known, number, positions)),
        replace(_ledger(slot, known, positions), engine=engine_in(origin)),
        origin,
        lacks=f"The file does not hold {'; nor '.join(lacks)}." if lacks else "",
    )


def write_slot(path: Path, cache: KVCache | StoredCache, like: Slot, layout: SlotLayout | None = None) -> Slot:
    """Write a cache as a slot of the kind of another one, which the server that saved that will restore.

    Slots that are not live are left out, the others are in the order of their positions. Numbers that are those of
    `like` at the same place are copied as they lie there, so that a slot in this order that nothing was done to is
    written bit for bit. States are those of `like`, and are written where the cache goes on as that does. The tokens
    are those of the cache, and where it has none, those of `like`, so that the server finds them all when it is asked
    to go on with `Slot.tokens` and more.

    Args:
        cache: of one row, its keys rotated to their positions; layers that keep states may store nothing.
        like: saved by the server that is to restore it, for the same model and cache types.

    Raises:
        UserError: the cache has other layers, rows or rotations, or what the engine cannot express: slots that are
            live in some heads or layers alone, slots of other models, a last slot that is not live, states after fewer
            or more tokens, or slots that come back into a window and were dropped.
    """
    known = layout or SlotLayout.of(like)
    known.refuse_other(like)
    ledger = cache.ledger
    ledger.refuse_mixed("A slot of llama.cpp")
    if len(cache.layers) != known.layers or ledger.batch != 1:
        raise UserError(
            f"The cache has {len(cache.layers)} layers and {ledger.batch} rows, but a slot of {like.path.name} holds "
            f"{known.layers} layers of one row; give the cache of one conversation of its model."
        )
    if ledger.rotated:
        raise UserError("The cache has keys at other positions than they are rotated to; give model.as_seen(cache).")
    refuse_dropped_within("A slot of llama.cpp", ledger, ledger.following, known.windows or _windows(like))
    tokens = _tokens(ledger, like)
    if len(tokens) != len(like.tokens) and len(like.attention) < len(like.memories):
        raise UserError(
            f"The cache goes on after {len(tokens)} tokens, and the states in {like.path.name} are those after "
            f"{len(like.tokens)}; give one that was saved there."
        )
    with replacing(path) as partial, partial.open("wb") as file:
        words = [PACKED, PACKED_VERSION, len(tokens), *tokens, 0] if like.packed else [*tokens]
        file.write(MAGIC + struct.pack(f"<{2 + len(words)}I", VERSION, len(words), *words))
        number = 0
        for memory in like.memories:
            if isinstance(memory, States):
                pieces = _states(like, memory)
            else:
                pieces = _attention(like, memory, known, known.memories[number], cache)
                number += 1
            for piece in pieces:
                file.write(piece)
    return read_slot(path)


def _positions(slot: Slot) -> list[int]:
    return sorted({position for memory in slot.attention for position in memory.positions})


def _ledger(slot: Slot, layout: SlotLayout, positions: Sequence[int]) -> Ledger:
    at = torch.tensor([positions], dtype=torch.long)
    live = torch.ones(layout.layers, 1, 1, len(positions), dtype=torch.bool)
    dropped = torch.zeros_like(at, dtype=torch.bool)
    for memory, layers in zip(slot.attention, layout.memories, strict=True):
        held = torch.isin(at, torch.tensor(memory.positions))
        dropped |= ~held
        for number in layers:
            live[number, :, 0] = held
    if bool(live.all()):
        live = live[:1]
    tokens = torch.tensor([[slot.tokens[position] for position in positions]], dtype=torch.long)
    following = torch.tensor([len(slot.tokens)])
    return replace(Ledger.of(tokens, at), live=live, dropped=dropped, following=following, names=("slot",))


def _windows(slot: Slot) -> tuple[int, ...]:
    """A window that is as long as that of the slot's model, or longer; none where no layer dropped a slot."""
    held = {*_positions(slot)}
    dropped = [position for memory in slot.attention for position in held.difference(memory.positions)]
    return (len(slot.tokens) - max(dropped),) if dropped else ()


def _layer(slot: Slot, layout: SlotLayout, number: int, positions: Sequence[int]) -> Layer:
    for memory, layers in zip(slot.attention, layout.memories, strict=True):
        if number in layers:
            at = layers.index(number)
            parts = _parts(slot, memory.keys[at], memory.turned[0], layout, number, _key_names(layout))
            if memory.values:
                parts |= _parts(slot, memory.values[at], memory.turned[1], layout, number, ("V",))
            if [*memory.positions] == [*positions]:
                return {name: tensor[None] for name, tensor in parts.items()}
            place = {position: slot for slot, position in enumerate(positions)}
            where = torch.tensor([place[position] for position in memory.positions])
            return {
                name: tensor.new_zeros(tensor.shape[0], len(positions), tensor.shape[2]).index_copy(1, where, tensor)[
                    None
                ]
                for name, tensor in parts.items()
            }
    return {}


def _key_names(layout: SlotLayout) -> tuple[str, ...]:
    """What a row of keys holds, in its order."""
    return ("rope", "latent") if layout.rope else ("K",)


def _parts(
    slot: Slot, rows: StoredRows, turned: int, layout: SlotLayout, number: int, names: tuple[str, ...]
) -> dict[str, Float[Tensor, "heads slots numbers"]]:
    """What a layer's rows of keys or values hold, part by part, in the order of the file's slots."""
    lines: Any = slot.bytes_of(rows)
    dtype = _NUMPY.get(rows.kind)
    numbers = _GGUF.dequantize(lines, rows.kind) if dtype is None else lines.view(dtype)
    flat = torch.from_numpy(np.array(numbers.T if rows.transposed else numbers, np.float32))
    heads = _turned(flat.unflatten(1, (layout.heads[number], -1)).transpose(0, 1), turned)
    if names == ("V",):
        return {"V": heads}
    if names == ("K",):
        return {"K": _halved(heads, layout.paired)}
    return {"latent": heads[..., layout.rope :], "rope": _halved(heads[..., : layout.rope], layout.paired)}


def _attention(
    like: Slot, memory: SlotAttention, layout: SlotLayout, layers: Sequence[int], cache: KVCache | StoredCache
) -> Iterator[bytes]:
    """A cache of attention as it is written, of these layers of the model."""
    live = cache.ledger.live.expand(layout.layers, -1, -1, -1)[[*layers]]
    if not bool((live == live[:1, :, :1]).all()):
        raise UserError(
            "Slots of the cache are live in some layers or heads alone, which llama.cpp cannot express: it shows a "
            "slot to all layers that share a memory, or to none; mask it in all of them."
        )
    kept = live[0, 0, 0].nonzero()[:, 0]
    positions = [*map(int, cache.ledger.positions[0, kept])]
    if not positions or len(set(positions)) < len(positions):
        raise UserError("llama.cpp needs a live slot, and no two at one position; leave one in view, or re-index.")
    if positions[-1] != (last := int(cache.ledger.following[0]) - 1):
        raise UserError(
            f"llama.cpp goes on right after a live slot alone, and the last one, at position {last}, is not live; "
            "leave it in view, re-index, or hide what comes before once more was read."
        )
    place = {position: cell for cell, position in enumerate(memory.positions)}
    cells = torch.tensor([place.get(position, -1) for position in positions])
    yield struct.pack("<I", memory.streams) + bytes(4 * memory.stream)
    yield struct.pack("<I", len(positions))
    yield np.array([[position, 1, memory.sequence] for position in positions], "<u4").tobytes()
    yield struct.pack("<4I", memory.transposed, len(layers), *memory.turned)
    written = ((_key_names(layout), memory.keys, memory.turned[0]), (("V",), memory.values, memory.turned[1]))
    for names, all_rows, turned in written:
        for number, rows in zip(layers, all_rows, strict=bool(all_rows)):
            layer = cache.layers[number]
            if any(name not in layer for name in names):
                raise UserError(f"Layer {number} of the cache stores no {' and '.join(names)}; give one of this model.")
            parts = {name: layer[name][0, :, kept].float().cpu() for name in names}
            if sum(part.shape[0] * part.shape[2] for part in parts.values()) != rows.numbers:
                raise UserError(
                    f"A slot of layer {number} of the cache has another size than one of {like.path.name}; give a "
                    "cache of the model that made that."
                )
            before = _parts(like, rows, turned, layout, number, names)
            same = (cells >= 0) & torch.stack(
                # Bit for bit, since NaN equals nothing.
                [
                    (before[name][:, cells].view(torch.int32) == part.view(torch.int32)).all(-1).all(0)
                    for name, part in parts.items()
                ]
            ).all(0)
            written = _by_slot(like, rows)[cells.numpy()]
            if not bool(same.all()):
                changed = {name: part[:, ~same] for name, part in parts.items()}
                written[~same.numpy()] = _encoded(changed, rows, turned, layout)
            yield _header(rows) + _lines(written, rows).tobytes()
    yield bytes(4 * (memory.streams - memory.stream - 1))


def _encoded(parts: dict[str, Tensor], rows: StoredRows, turned: int, layout: SlotLayout) -> np.ndarray:
    """The bytes of each slot."""
    pieces = [part if name in ("V", "latent") else _doubled(part, layout.paired) for name, part in parts.items()]
    flat = _turned(torch.cat(pieces, 2), turned).transpose(0, 1).flatten(1)
    dtype = _NUMPY.get(rows.kind)
    numbers = flat.contiguous().numpy()
    if dtype is None or dtype.itemsize == 2:
        beyond = flat.abs() > torch.finfo(torch.float16).max
        unheld = beyond | flat.isnan() if dtype is None else beyond & ~flat.isinf()  # f16 has NaN and infinity
        if bool(unheld.any()):
            raise UserError(
                f"Slots that are not as the server saved them hold numbers that {rows.kind.name.lower()} cannot, above "
                f"65,504{' or NaN' if dtype is None else ''}; start the server with a cache in f32."
            )
    return _GGUF.quantize(numbers, rows.kind) if dtype is None else numbers.astype(dtype).view(np.uint8)


def _by_slot(slot: Slot, rows: StoredRows) -> np.ndarray:
    """The bytes of each slot, as they lie in the file."""
    lines = slot.bytes_of(rows)
    return np.ascontiguousarray(lines.view(_NUMPY[rows.kind]).T).view(np.uint8) if rows.transposed else lines


def _lines(written: np.ndarray, rows: StoredRows) -> np.ndarray:
    """The opposite of `_by_slot`."""
    return written.view(_NUMPY[rows.kind]).T if rows.transposed else written


def _header(rows: StoredRows) -> bytes:
    nbytes = row_bytes(rows.kind, rows.numbers)
    if rows.transposed:
        return struct.pack("<iII", rows.kind, nbytes // rows.numbers, rows.numbers)
    return struct.pack("<iQ", rows.kind, nbytes)


def _states(slot: Slot, memory: States) -> Iterator[bytes]:
    """States as they were."""
    yield struct.pack("<I", len(memory.positions))
    yield b"".join(struct.pack("<2I", position, 0) for position in memory.positions)
    yield struct.pack("<2I", 0, memory.layers)
    for rows in (*memory.inputs, *memory.states):
        yield _header(rows) + slot.bytes_of(rows).tobytes()


def _tokens(ledger: Ledger, like: Slot) -> list[int]:
    """A token for each position before the next one."""
    count = int(ledger.following[0])
    tokens = [*like.tokens[:count], *[_FILLER] * (count - len(like.tokens))]
    live = ledger.live_somewhere[0]
    for shown in (~live & ~ledger.padding[0], live):  # a slot that was hidden may be where a live one is now
        for token, position in zip(ledger.tokens[0, shown].tolist(), ledger.positions[0, shown].tolist(), strict=True):
            if position < count and token >= 0:  # a fitted slot has no token
                tokens[position] = token
    return tokens


def _turned(part: Float[Tensor, "heads slots numbers"], width: int) -> Float[Tensor, "heads slots numbers"]:
    """Multiplied with the Hadamard matrix of this width, piece by piece; doing it twice changes nothing."""
    if not width:
        return part
    if part.shape[2] % width:
        raise UserError(f"Heads of {part.shape[2]} numbers are not turned in pieces of {width}; give the slot's model.")
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (part.unflatten(2, (-1, width)) @ (matrix / width**0.5)).flatten(2)


def _halved(keys: Float[Tensor, "heads slots numbers"], paired: int) -> Float[Tensor, "heads slots numbers"]:
    """Pairs of neighbours brought half of them apart."""
    return torch.cat([keys[..., 0:paired:2], keys[..., 1:paired:2], keys[..., paired:]], 2)


def _doubled(keys: Float[Tensor, "heads slots numbers"], paired: int) -> Float[Tensor, "heads slots numbers"]:
    """The opposite of `_halved`."""
    pairs = keys[..., :paired].unflatten(2, (2, -1)).transpose(2, 3).flatten(2) if paired else keys[..., :0]
    return torch.cat([pairs, keys[..., paired:]], 2)
