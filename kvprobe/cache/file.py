"""A cache on disk: one safetensors file with what each layer stores and the ledger. There is no pickle.

A digest in its metadata covers everything else: name, dtype, shape and bytes of each tensor, and the other metadata,
including the fingerprint of the model that made the cache.
"""

import json
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.cache.computed import ENGINES
from kvprobe.cache.layer import Layer, refuse_misfit
from kvprobe.cache.ledger import COLUMNS, NO_TOKEN, OWN, PADDING, Ledger, QuantisationFormat
from kvprobe.cache.parts import LAYERS, PARTS
from kvprobe.errors import UserError
from kvprobe.files import replacing, told
from kvprobe.fingerprint import Maker, digest
from kvprobe.names import one_line, shown

FORMAT = "kvprobe-cache-4"
"""Version 3 knew no slots without tokens and none of other models; version 2 had neither digest nor fingerprint."""
READ = (FORMAT, "kvprobe-cache-3")
"""Formats that can be read."""
MOST_LAYERS = 4096
_LEDGER_FIELDS = (*COLUMNS, "live", "following")
_SELDOM = ("edited", "dropped")
"""Fields that are in a file where they say something."""
_CALLED: dict[str, str] = dict(zip(PARTS, ("keys", "values", *PARTS[2:]), strict=True))
"""What the tensors of a part are called in a file, before the number of their layer."""


def save_cache(path: Path, layers: Sequence[Layer], ledger: Ledger, made_by: Maker | None) -> None:
    """Write a cache to `path`; if writing fails, an older file there stays whole.

    Raises:
        UserError: the system refuses the file, or the fingerprint of its maker cannot be computed.
    """
    ledger = ledger.without_unused()
    tensors = {
        f"{_CALLED[part]}.{number}": tensor.contiguous()
        for number, layer in enumerate(layers)
        for part, tensor in layer.items()
    }
    # Cloned, because columns may share storage, which safetensors refuses.
    tensors |= {name: getattr(ledger, name).clone().contiguous() for name in _LEDGER_FIELDS}
    for name in _SELDOM:
        if not bool(getattr(ledger, name).any()):
            del tensors[name]
    metadata = {
        "format": FORMAT,
        "layers": str(len(layers)),
        "names": json.dumps(ledger.names),
        "grain": json.dumps(ledger.quantisation and [ledger.quantisation.bits, ledger.quantisation.group]),
        "made_by": "" if made_by is None else made_by.confirmed(),
        "others": json.dumps([maker.confirmed() for maker in ledger.others]),
    }
    if ledger.engine is not None:
        metadata["engine"] = ledger.engine
    metadata["digest"] = _digest(tensors, metadata)
    with replacing(path) as partial:
        save_file(tensors, partial, metadata=metadata)


def load_cache(path: Path) -> tuple[tuple[Layer, ...], Ledger, Maker | None]:
    """Layers, ledger and maker of the cache in `path`.

    Raises:
        UserError: the file is missing, truncated, altered, or not written by `save_cache`.
    """
    with opened(path) as file:
        metadata = _metadata(file, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        if metadata.pop("digest", None) != _digest(tensors, metadata):
            raise UserError(f"{path} was altered after the cache was saved (its digest differs); save it again.")
        count, ledger, made_by = _header(file, path)
        return tuple(_layer(file, number, ledger) for number in range(count)), ledger, made_by


def read_header(path: Path) -> tuple[int, Ledger, Maker | None]:
    """How many layers a cache in a file has, its ledger and maker. The digest is not checked, so that a damaged cache
    can be looked at.

    Raises:
        UserError: as `load_cache` does.
    """
    with opened(path) as file:
        return _header(file, path)


def read_layer(path: Path, ledger: Ledger, number: int) -> Layer:
    """One layer of a cache in a file.

    Args:
        ledger: that of the file, which the layer must fit.

    Raises:
        UserError: the file is not what it was when its header was read, or the layer does not fit.
    """
    with opened(path) as file:
        return _layer(file, number, ledger)


@contextmanager
def opened(path: Path) -> Generator[safe_open]:
    """A safetensors file, whose size its header justifies; what is wrong with it is a `UserError`.

    Its tensors lie in the file until they are used, and pages of it are in memory as long as a tensor of it is.
    """
    if not path.is_file():
        raise UserError(f"There is no cache file at {path}; check the path.")
    try:
        with told(path), safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({one_line(error)}); save it again.") from error


def _metadata(file: safe_open, path: Path) -> dict[str, str]:
    metadata = file.metadata() or {}
    if metadata.get("format") not in READ:
        raise UserError(
            f"{path} is not a kvprobe cache (its format is {shown(metadata.get('format'))}, "
            f"expected {FORMAT!r}); make the cache again and write it with KVCache.save."
        )
    return metadata


def _header(file: safe_open, path: Path) -> tuple[int, Ledger, Maker | None]:
    metadata, names = _metadata(file, path), set(file.keys())
    try:
        count = int(metadata["layers"])
        segments = json.loads(metadata["names"])
        quantisation = json.loads(metadata["grain"])
        made_by, engine = metadata["made_by"], metadata.get("engine")
        if engine is not None and engine not in ENGINES:
            raise ValueError(f"computed by {shown(engine)}")
        # Up to version 3, all slots of a file were of one model.
        before = metadata["format"] != FORMAT
        fields = [name for name in _LEDGER_FIELDS if name not in _SELDOM or name in names]
        fields = [name for name in fields if not (before and name == "makers")]
        if missing := names.symmetric_difference(fields).intersection(fields):
            raise KeyError(", ".join(sorted(missing)))
        columns = {name: file.get_tensor(name) for name in fields}
        columns = dict.fromkeys(_SELDOM, torch.zeros_like(columns["tokens"], dtype=torch.bool)) | columns
        if before:
            columns["makers"] = torch.full_like(columns["tokens"], OWN)
        ledger = Ledger(
            **columns,
            others=() if before else tuple(Maker(str(maker)) for maker in json.loads(metadata["others"])),
            names=tuple(map(str, segments)),
            quantisation=None if quantisation is None else QuantisationFormat(*map(int, quantisation)),
            engine=engine,
        )
        if count not in range(1, MOST_LAYERS + 1):
            raise ValueError(f"{count} layers")
        layers = [_parts(names, number) for number in range(count)]
        for number, parts in enumerate(layers):
            if parts not in LAYERS:
                raise KeyError(f"layer {number} has {', '.join(parts)}")
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{path} lacks a part of the cache ({one_line(error)}); save it again.") from error
    tensors = {f"{_CALLED[part]}.{number}" for number, parts in enumerate(layers) for part in parts}
    if others := names.difference(tensors, _LEDGER_FIELDS):
        raise UserError(f"{path} holds tensors that no cache has ({shown(min(others))}); save it again.")
    first = [f"{_CALLED[parts[0]]}.{number}" for number, parts in enumerate(layers) if parts]
    shapes: list[list[int]] = [file.get_slice(name).get_shape() for name in first]
    if not shapes or any(len(shape) != 4 for shape in shapes):
        raise UserError(f"{path} holds no keys of a cache; it was altered, save it again.")
    _check_ledger(ledger, count, {shape[1] for shape in shapes}, path)
    return count, ledger, Maker(made_by) if made_by else None


def _layer(file: safe_open, number: int, ledger: Ledger) -> Layer:
    parts = _parts(set(file.keys()), number)
    layer = {part: file.get_tensor(f"{_CALLED[part]}.{number}") for part in parts}
    refuse_misfit(number, layer, ledger.batch, ledger.slots)
    return layer


def _parts(names: Collection[str], number: int) -> tuple[str, ...]:
    return tuple(part for part in PARTS if f"{_CALLED[part]}.{number}" in names)


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    pieces: list[bytes | memoryview] = [json.dumps(sorted(metadata.items())).encode()]
    for name, tensor in sorted(tensors.items()):
        pieces.append(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        pieces.append(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest(pieces, 16)


def _check_ledger(ledger: Ledger, cache_layers: int, kv_heads: set[int], path: Path) -> None:
    shape = tuple(ledger.tokens.shape)
    booleans = ("recomputed", "delimiters", *_SELDOM)
    columns_fit = all(
        tuple(column.shape) == shape and column.dtype == (torch.bool if name in booleans else torch.long)
        for name, column in ((name, getattr(ledger, name)) for name in COLUMNS)
    )
    following_fits = tuple(ledger.following.shape) == shape[:1] and ledger.following.dtype == torch.long
    live = ledger.live
    live_fits = live.dtype == torch.bool and live.dim() == 4 and (live.shape[1], live.shape[3]) == shape
    live_fits = live_fits and live.shape[0] in (1, cache_layers) and (live.shape[2] == 1 or {live.shape[2]} == kv_heads)
    made = (ledger.makers >= OWN) & (ledger.makers < len(ledger.others))
    named = made & (ledger.segments >= PADDING) & (ledger.segments < len(ledger.names)) & (ledger.tokens >= NO_TOKEN)
    quantised = ledger.quantisation is not None or bool((ledger.quantised == -1).all())
    if not (len(shape) == 2 and columns_fit and following_fits and live_fits and bool(named.all()) and quantised):
        raise UserError(f"The ledger in {path} does not fit its slots; it was altered, save it again.")
