"""A cache on disk: one safetensors file, the ledger beside the keys and values. No pickle anywhere."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvprobe.cache import KVCache
from kvprobe.ledger import Ledger

FORMAT = "kvprobe-cache-1"
_LEDGER_FIELDS = ("tokens", "positions", "segments", "recomputed", "live")


def save_cache(cache: KVCache, path: Path) -> None:
    """Write `cache` to `path`; a half-written file never takes the place of an older one."""
    tensors = {f"keys.{layer}": tensor.contiguous() for layer, tensor in enumerate(cache.keys)}
    tensors |= {f"values.{layer}": tensor.contiguous() for layer, tensor in enumerate(cache.values)}
    tensors |= {name: getattr(cache.ledger, name).contiguous() for name in _LEDGER_FIELDS}
    metadata = {
        "format": FORMAT,
        "layers": str(cache.n_layers),
        "names": json.dumps(cache.ledger.names),
    }
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)


def load_cache(path: Path) -> KVCache:
    """Read a cache from `path`; anything that `save_cache` did not write whole is refused."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no cache file at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is not a kvprobe cache (its format is {metadata.get('format')!r}, "
                    f"expected {FORMAT!r}); write one with KVCache.save."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}); save it again.") from error
    try:
        layers = int(metadata["layers"])
        names = json.loads(metadata["names"])
        ledger = Ledger(**{name: tensors.pop(name) for name in _LEDGER_FIELDS}, names=tuple(map(str, names)))
        keys = tuple(tensors.pop(f"keys.{layer}") for layer in range(layers))
        values = tuple(tensors.pop(f"values.{layer}") for layer in range(layers))
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} lacks a part of the cache ({error}); save it again.") from error
    if tensors:
        raise ValueError(f"{path} holds tensors that no cache has: {', '.join(sorted(tensors))}.")
    _check_ledger(ledger, keys, path)
    for layer, pair in enumerate(zip(keys, values, strict=True)):
        if any(bool(torch.isnan(tensor).any()) for tensor in pair):
            raise ValueError(f"{path} holds NaN in layer {layer}; a cache must be finite to be attended to.")
    return KVCache(keys, values, ledger)


def _check_ledger(ledger: Ledger, keys: tuple[torch.Tensor, ...], path: Path) -> None:
    shape = ledger.tokens.shape
    same = all(t.shape == shape for t in (ledger.positions, ledger.segments, ledger.recomputed))
    layers, batch, heads, slots = ledger.live.shape if ledger.live.dim() == 4 else (0, 0, 0, 0)
    live_fits = (batch, slots) == tuple(shape) and layers in (1, len(keys)) and heads in (1, keys[0].shape[1])
    names_fit = shape.numel() == 0 or -1 <= int(ledger.segments.min()) <= int(ledger.segments.max()) < len(
        ledger.names
    )
    if not (len(shape) == 2 and same and live_fits and names_fit):
        raise ValueError(f"The ledger in {path} does not fit its slots; the file was altered, save it again.")
