"""A plain layout for the cache of any engine: NAME.safetensors, and NAME.json that says how to read it.

The file of tensors holds `tokens` (the ids, one for each slot) and, of each layer, `K.0`, `V.0`, `K.1` …, or the other
parts that kvprobe knows (`latent.0`, `rope.0`). It may hold `positions` (0, 1, 2 … otherwise), and `blocks`, a table:
which of the blocks in the tensors holds the first slots of the text, which the next ones. The JSON holds the fields of
`PlainHeader`. A dump is of one text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.cache.computed import engine_in
from kvprobe.cache.file import MOST_LAYERS, opened
from kvprobe.cache.layer import Layer, refuse_misfit
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.parts import LAYERS, PARTS
from kvprobe.cache.stored import LazyLayers, StoredCache
from kvprobe.errors import UserError
from kvprobe.files import MAX_BYTES, FileVersion, expanded, read_json, replacing, told, write_whole
from kvprobe.names import shown
from kvprobe.plain_data import Limits, filled

FORMAT = "plain-kv-1"
AXES = ("blocks", "slots", "heads", "numbers")
"""What the axes of a tensor count: slots are those of a block, where there are blocks."""
MOST_SLOTS = 2**24
MOST = 2**31
"""Above all tokens and positions."""
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
_LIMITS = Limits(text=1000, entries=0, one_line=True)


@dataclass(frozen=True)
class PlainHeader:
    """What the JSON of a plain dump holds.

    Attributes:
        format: the version of this layout.
        layers: how many the model has. Those of which the file has no tensor store nothing.
        axes: of all tensors of layers, in order: `slots`, `heads`, `numbers`, and `blocks` where there are blocks.
        engine: which one wrote it, in words, with its version.
        model: which one computed it, in words.
        block: slots in a block of the engine, where the tensors have no blocks any more.
        lacks: what of the cache is missing, in words, such as the states of recurrent layers.
    """

    format: Literal["plain-kv-1"]
    layers: int
    axes: str = "slots heads numbers"
    engine: str = ""
    model: str = ""
    block: int | None = None
    lacks: str = ""


@checked_arguments
def open_plain(path: str | Path) -> StoredCache:
    """A plain dump, of which a layer is read when it is asked for.

    Args:
        path: its JSON, or a folder with one JSON.

    Raises:
        UserError: a file is missing, truncated, or does not hold what the layout asks for.
    """
    path = _json_of(expanded(path))
    header = filled(PlainHeader, read_json(path, MAX_BYTES, unique=True), str(path), _LIMITS)
    if header.layers not in range(1, MOST_LAYERS + 1):
        raise UserError(f"{path} names {header.layers} layers; expected 1 to {MOST_LAYERS}.")
    if header.block is not None and header.block < 1:
        raise UserError(f"{path} names blocks of {header.block} slots; expected at least 1.")
    axes = tuple(header.axes.split())
    if sorted(axes) not in (sorted(AXES), sorted(AXES[1:])):
        raise UserError(
            f"The axes in {path} are {header.axes!r}; give slots, heads and numbers in the order of the tensors, and "
            "blocks where there are blocks."
        )
    tensors = path.with_suffix(".safetensors")
    version = FileVersion.of(tensors)
    with opened(tensors) as file:
        ledger = replace(_ledger(file, tensors), engine=engine_in(header.engine))
        table = _table(file, tensors)
        sizes = [_sizes(file, tensors, name, axes) for name in _names(file, header.layers, tensors)]
    if len({(size.get("blocks", 1), size["slots"]) for size in sizes}) > 1:
        raise UserError(f"Layers in {tensors} have different numbers of blocks or slots; dump all of one text.")
    table = _checked(table, sizes[0], ledger.slots, tensors)
    return StoredCache(
        layers=LazyLayers(header.layers, partial(_layer, tensors, axes, table, ledger), version),
        ledger=ledger,
        origin=f"a plain dump of {header.engine or 'an unnamed engine'}" + f" ({header.model})" * bool(header.model),
        block=sizes[0]["slots"] if "blocks" in axes else header.block,
        lacks=header.lacks,
    )


@checked_arguments
def save_plain(
    cache: KVCache | StoredCache,
    path: str | Path,
    *,
    engine: str = "kvprobe",
    model: str = "",
    block: AtLeastOne | None = None,
) -> None:
    """Write a cache of one text as a plain dump.

    Args:
        path: the JSON; the tensors go into a file beside it.
        engine, model, block: see `PlainHeader`; the block is that of a stored cache, by default.

    Raises:
        UserError: the cache has several rows, hidden or fitted slots, slots of other models, keys that were given
            other positions, or does not go on right after its last slot; or another file has the name of its tensors.
    """
    ledger = cache.ledger
    ledger.refuse_fitted("A plain dump")
    ledger.refuse_mixed("A plain dump")
    if ledger.batch != 1 or not ledger.slots or not bool(ledger.live.all()):
        raise UserError("A plain dump is of one text whose slots are all live; choose a row, and evict hidden slots.")
    if ledger.rotated:
        raise UserError(
            "Keys of this cache were given other positions and are rotated to them only when a model reads them; a "
            "plain dump holds keys at their positions, so write the cache before `reindex`."
        )
    tensors = {
        f"{part}.{number}": tensor[0].transpose(0, 1).contiguous()
        for number, layer in enumerate(cache.layers)
        for part, tensor in layer.items()
    }
    tensors |= {"tokens": ledger.tokens[0].clone(), "positions": ledger.positions[0].clone()}
    if (following := int(ledger.following[0])) != (after := int(ledger.positions.max()) + 1):
        raise UserError(
            f"The next token of this cache stands at position {following}, and what reads a plain dump goes on right "
            f"after its last slot, at {after}; leave that slot in the cache, or use cache.save."
        )
    known = {"block": cache.block, "lacks": cache.lacks} if isinstance(cache, StoredCache) else {}
    known |= {"block": block} if block else {}
    if ledger.engine not in (None, engine_in(engine)):
        engine = f"{engine}, computed by {ledger.engine}"
    header = replace(PlainHeader(FORMAT, len(cache.layers), engine=engine, model=model), **known)
    filled(PlainHeader, asdict(header), "The dump", _LIMITS)  # what cannot be opened again is not written
    path = expanded(path)
    if path.suffix != ".json":
        raise UserError(f"{path} is to be the JSON of a plain dump; let its name end in .json.")
    beside = path.with_suffix(".safetensors")
    if beside.exists() and not path.exists():
        raise UserError(
            f"{beside} exists and is no part of a dump at {path.name}, whose tensors would take its place; choose "
            "another name."
        )
    with replacing(beside) as partial_file:
        save_file(tensors, partial_file)
    write_whole(path, json.dumps(asdict(header), indent=2) + "\n")


def _json_of(path: Path) -> Path:
    with told(path):
        if path.is_dir():
            found = sorted(path.glob("*.json"))
            if len(found) != 1:
                raise UserError(f"The folder {path} has {len(found)} JSON files; give the one of the dump.")
            path = found[0]
        if not path.is_file():
            raise UserError(f"There is no file {path}; give the JSON of a plain dump, or its folder.")
    return path


def _whole_numbers(file: safe_open, path: Path, name: str) -> Int[Tensor, "entries"]:
    """A tensor of counts.

    Raises:
        UserError: it is something else.
    """
    tensor = file.get_tensor(name)
    if tensor.dim() != 1 or not 0 < tensor.numel() <= MOST_SLOTS or tensor.dtype not in _WHOLE:
        raise UserError(
            f"{name} in {path} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected whole numbers, one for each "
            f"entry, of which there are 1 to {MOST_SLOTS:,}."
        )
    numbers = tensor.long()
    for number in (int(numbers.min()), int(numbers.max())):
        if not 0 <= number < MOST:
            raise UserError(f"{name} in {path} holds {number}; expected whole numbers from 0 to {MOST - 1:,}.")
    return numbers


def _ledger(file: safe_open, path: Path) -> Ledger:
    names = file.keys()
    if "tokens" not in names:
        raise UserError(f"{path} holds no tokens; a plain dump has their ids, one for each slot.")
    tokens = _whole_numbers(file, path, "tokens")
    if "positions" not in names:
        return Ledger.of(tokens[None])
    positions = _whole_numbers(file, path, "positions")
    if positions.shape != tokens.shape:
        raise UserError(f"{path} holds {len(tokens)} tokens and {len(positions)} positions; give one for each slot.")
    return Ledger.of(tokens[None], positions[None])


def _table(file: safe_open, path: Path) -> Int[Tensor, "blocks"] | None:
    return _whole_numbers(file, path, "blocks") if "blocks" in file.keys() else None  # noqa: SIM118 - not a dict


def _names(file: safe_open, layers: int, path: Path) -> Sequence[str]:
    """The tensors of layers."""
    names = set(file.keys()) - {"tokens", "positions", "blocks"}
    expected: list[str] = []
    for number in range(layers):
        parts = _parts(names, number)
        if parts not in LAYERS:
            raise UserError(f"Layer {number} in {path} has {', '.join(parts)} and lacks the rest; dump all of it.")
        expected += [f"{part}.{number}" for part in parts]
    if others := names.difference(expected):
        raise UserError(
            f"{path} holds {shown(min(others))}, which is no part of the {layers} layers that its JSON names; expected "
            "names such as K.0 and V.0."
        )
    if not expected:
        raise UserError(f"{path} holds no layer; expected tensors with names such as K.0 and V.0.")
    return expected


def _parts(names: set[str], number: int) -> tuple[str, ...]:
    return tuple(part for part in PARTS if f"{part}.{number}" in names)


def _sizes(file: safe_open, path: Path, name: str, axes: tuple[str, ...]) -> Mapping[str, int]:
    """What each axis of a tensor counts, and how far; it is not read."""
    shape: list[int] = file.get_slice(name).get_shape()
    if len(shape) != len(axes) or 0 in shape:
        raise UserError(f"{name} in {path} has shape {shown(tuple(shape))}; its JSON says {' × '.join(axes)}.")
    return dict(zip(axes, shape, strict=True))


def _checked(
    table: Int[Tensor, "blocks"] | None, sizes: Mapping[str, int], slots: int, path: Path
) -> Int[Tensor, "blocks"]:
    """The block table, or the one that counts up."""
    paged, blocks, block = "blocks" in sizes, sizes.get("blocks", 1), sizes["slots"]
    if table is None:
        table = torch.arange(blocks)
    elif not paged:
        raise UserError(f"{path} holds a block table, but its JSON names no axis of blocks; name it, or leave it out.")
    different = len(table.unique())
    if different < len(table) or int(table.max()) >= blocks:
        raise UserError(
            f"The block table in {path} has {len(table)} entries, {different} of them different, up to "
            f"{int(table.max())}; expected each of the {blocks} blocks of the tensors once at most, counted from 0."
        )
    if not (slots <= len(table) * block < slots + block if paged else slots == block):
        raise UserError(
            f"{path} holds {slots} tokens, and its layers {len(table) * block} slots; expected a slot for each token"
            + (f", in whole blocks of {block}." if paged else ".")
        )
    return table


def _layer(
    path: Path, axes: tuple[str, ...], table: Int[Tensor, "blocks"], ledger: Ledger, number: int
) -> Mapping[str, Float[Tensor, "1 _ slots _"]]:
    with opened(path) as file:
        parts = _parts(set(file.keys()), number)
        layer: Layer = {
            part: _arranged(file.get_tensor(f"{part}.{number}"), axes, table, ledger.slots) for part in parts
        }
    refuse_misfit(number, layer, 1, ledger.slots)
    return layer


def _arranged(
    tensor: Tensor, axes: tuple[str, ...], table: Int[Tensor, "blocks"], slots: int
) -> Float[Tensor, "1 heads slots numbers"]:
    """The tensor as kvprobe's caches have it."""
    if "blocks" not in axes:
        return tensor.permute([axes.index(name) for name in ("heads", "slots", "numbers")])[None]
    in_order = tensor.index_select(axes.index("blocks"), table)
    by_head = in_order.permute([axes.index(name) for name in ("heads", "blocks", "slots", "numbers")])
    return by_head.flatten(1, 2)[None, :, :slots]
