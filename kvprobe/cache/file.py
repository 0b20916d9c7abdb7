"""A cache on disk: one safetensors file with what each layer stores and the ledger. There is no pickle.

A digest in its metadata covers everything else: name, dtype, shape and bytes of each tensor, and the other metadata,
including the fingerprint of the model that made the cache.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import COLUMNS, PADDING, Ledger, QuantisationFormat
from kvprobe.cache.parts import LAYERS, PARTS
from kvprobe.errors import UserError
from kvprobe.files import replacing
from kvprobe.fingerprint import Maker, digest
from kvprobe.names import one_line

FORMAT = "kvprobe-cache-3"
"""Version 2 had neither digest nor fingerprint."""
_LEDGER_FIELDS = (*COLUMNS, "live", "following")
_CALLED: dict[str, str] = dict(zip(PARTS, ("keys", "values", *PARTS[2:]), strict=True))
"""What the tensors of a part are called in a file, before the number of their layer."""


def save_cache(path: Path, layers: Sequence[Layer], ledger: Ledger, made_by: Maker | None) -> None:
    """Write a cache to `path`; if writing fails, an older file there stays whole.

    Raises:
        UserError: the system refuses the file, or the fingerprint of its maker cannot be computed.
    """
    tensors = {
        f"{_CALLED[part]}.{number}": tensor.contiguous()
        for number, layer in enumerate(layers)
        for part, tensor in layer.items()
    }
    # Cloned, because columns may share storage, which safetensors refuses.
    tensors |= {name: getattr(ledger, name).clone().contiguous() for name in _LEDGER_FIELDS}
    metadata = {
        "format": FORMAT,
        "layers": str(len(layers)),
        "names": json.dumps(ledger.names),
        "grain": json.dumps(ledger.quantisation and [ledger.quantisation.bits, ledger.quantisation.group]),
        "made_by": "" if made_by is None else made_by.confirmed(),
    }
    metadata["digest"] = _digest(tensors, metadata)
    with replacing(path) as partial:
        save_file(tensors, partial, metadata=metadata)


def load_cache(path: Path) -> tuple[tuple[Layer, ...], Ledger, Maker | None]:
    """Layers, ledger and maker of the cache in `path`.

    Raises:
        UserError: the file is missing, truncated, altered, or not written by `save_cache`.
    """
    if not path.is_file():
        raise UserError(f"There is no cache file at {path}; give one that KVCache.save wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(
                    f"{path} is not a kvprobe cache (its format is {metadata.get('format')!r}, "
                    f"expected {FORMAT!r}); make the cache again and write it with KVCache.save."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({one_line(error)}); save it again.") from error
    if metadata.pop("digest", None) != _digest(tensors, metadata):
        raise UserError(f"{path} was altered after the cache was saved (its digest differs); save it again.")
    try:
        count = int(metadata["layers"])
        names = json.loads(metadata["names"])
        quantisation = json.loads(metadata["grain"])
        made_by = metadata["made_by"]
        ledger = Ledger(
            **{name: tensors.pop(name) for name in _LEDGER_FIELDS},
            names=tuple(map(str, names)),
            quantisation=None if quantisation is None else QuantisationFormat(*map(int, quantisation)),
        )
        layers: list[Layer] = []
        for number in range(count):
            parts = tuple(part for part in PARTS if f"{_CALLED[part]}.{number}" in tensors)
            if parts not in LAYERS:
                raise KeyError(f"layer {number} has {', '.join(parts)}")
            layers.append({part: tensors.pop(f"{_CALLED[part]}.{number}") for part in parts})
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} lacks a part of the cache ({error}); save it again.") from error
    if tensors:
        raise UserError(f"{path} holds tensors that no cache has ({', '.join(sorted(tensors))}); save it again.")
    if not any(layers) or any(tensor.dim() != 4 for layer in layers for tensor in layer.values()):
        raise UserError(f"{path} holds no keys of a cache; it was altered, save it again.")
    _check_ledger(ledger, count, {layer[next(iter(layer))].shape[1] for layer in layers if layer}, path)
    return tuple(layers), ledger, Maker(made_by) if made_by else None


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    pieces: list[bytes | memoryview] = [json.dumps(sorted(metadata.items())).encode()]
    for name, tensor in sorted(tensors.items()):
        pieces.append(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        pieces.append(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest(pieces, 16)


def _check_ledger(ledger: Ledger, cache_layers: int, kv_heads: set[int], path: Path) -> None:
    shape = tuple(ledger.tokens.shape)
    booleans = ("recomputed", "delimiters")
    columns_fit = all(
        tuple(column.shape) == shape and column.dtype == (torch.bool if name in booleans else torch.long)
        for name, column in ((name, getattr(ledger, name)) for name in COLUMNS)
    )
    following_fits = tuple(ledger.following.shape) == shape[:1] and ledger.following.dtype == torch.long
    live = ledger.live
    live_fits = live.dtype == torch.bool and live.dim() == 4 and (live.shape[1], live.shape[3]) == shape
    live_fits = live_fits and live.shape[0] in (1, cache_layers) and (live.shape[2] == 1 or {live.shape[2]} == kv_heads)
    named = (ledger.segments >= PADDING) & (ledger.segments < len(ledger.names))
    quantised = ledger.quantisation is not None or bool((ledger.quantised == -1).all())
    if not (len(shape) == 2 and columns_fit and following_fits and live_fits and bool(named.all()) and quantised):
        raise UserError(f"The ledger in {path} does not fit its slots; it was altered, save it again.")
