"""How a model rotates its keys by position: chosen among its own frequencies, and proved on the model."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprobe.cache.parts import INDEX, ROTATED
from kvprobe.cache.rotary import Layout, Rotary, Rotation
from kvprobe.errors import UserError
from kvprobe.models.geometry import Geometry, embedded_tokens
from kvprobe.models.hf_cache import CACHE, empty_layers, held_by, past_key_values
from kvprobe.models.recurrent import recurrent_modules, writes_noted
from kvprobe.weights import device_of

_PROBED_POSITION, _PROBED_TOKENS = 37, 4


def rotaries_of(plain: PreTrainedModel, geometry: Geometry) -> tuple[dict[str, Rotary | None], ...]:
    """How each layer's keys are rotated by position, by part; None where they are not (layers without position
    encoding).

    A single token attends only to itself, so its keys at two positions differ by that rotation alone, at every layer.

    Raises:
        UserError: keys are not rotated (positions are added to the embeddings), or frequencies change with the length.
    """
    device, dtype = device_of(plain), next(plain.parameters()).dtype
    far = min(_PROBED_POSITION, (geometry.max_position or _PROBED_POSITION + 1) - 1)
    # Several tokens, one per row: the embedding of one (padding) may be zero, and so are its keys.
    tokens = torch.arange(1, 2 * _PROBED_TOKENS, 2, device=device)[:, None]
    ids = tokens * embedded_tokens(plain) // (2 * _PROBED_TOKENS)
    at = torch.tensor([[0], [far]], device=device).repeat_interleave(len(ids), 0)
    layers = empty_layers(geometry.parts)
    past = past_key_values(layers)
    with torch.no_grad(), writes_noted(recurrent_modules(plain, len(geometry.recurrent))):
        plain(input_ids=ids.repeat(2, 1), position_ids=at, use_cache=True, **{CACHE: past})
    candidates = rotaries_within(plain)
    rotaries: list[dict[str, Rotary | None]] = [{} for _ in layers]
    names = [(layer, part.name) for layer, parts in enumerate(geometry.layers) for part in parts]
    tensors = [tensor for layer in layers for tensor in held_by(layer)]
    for (layer, name), tensor in zip(names, tensors, strict=True):
        if name not in ROTATED:
            continue
        kind = "index keys" if name == INDEX else "keys"
        first, last = tensor.chunk(2)
        errors = {None: _relative(first, last)} | {
            number: _relative(Rotation.between(rotary, at[: len(ids)], at[len(ids) :]).of(first), last)
            for number, rotary in enumerate(candidates)
            if 2 * len(rotary.frequencies) <= first.shape[3]
        }
        best = min(errors, key=errors.__getitem__)
        # `not <=` instead of `>`: a NaN must not pass.
        if not errors[best] <= max(1e-4, 8 * torch.finfo(dtype).eps):
            raise UserError(
                f"The {kind} of layer {layer} of {type(plain).__name__} are not rotated by any of the model's "
                f"frequencies (they are off by {errors[best]:.0e}), so they cannot be re-indexed; "
                f"use mode='gapped', or recompute the slots."
                if candidates
                else f"{type(plain).__name__} has learned positions (or sinusoidal ones, added likewise), which are in "
                f"K and V of every layer and cannot be re-indexed; use mode='gapped', or recompute the slots."
            )
        rotaries[layer][name] = None if best is None else candidates[best]
    return tuple(rotaries)


def rotaries_within(module: nn.Module) -> list[Rotary]:
    """Every way in which keys may be rotated by the frequencies that this module or one within it holds.

    Raises:
        UserError: frequencies change with the length.
    """
    layouts: tuple[Layout, ...] = ("half", "interleaved")
    rotaries: list[Rotary] = []
    for part in module.modules():
        table = getattr(part, "embed_positions", None)
        if isinstance(table, Tensor) and table.dim() == 2:  # GPT-J: sines, then cosines, of each position
            sines, cosines = table[1].float().chunk(2)
            rotaries += [Rotary(torch.atan2(sines, cosines), layout) for layout in layouts]
        kinds = getattr(part, "rope_type", None)
        if kinds is None:
            continue
        names: list[object] = [*kinds.values()] if isinstance(kinds, dict) else [kinds]
        if "dynamic" in names or "longrope" in names:
            raise UserError(
                f"{type(module).__name__} changes its rotary frequencies with the length ({kinds}), so a key "
                f"cannot be rotated to another position; use mode='gapped', or recompute the slots."
            )
        for name, frequencies in part.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                rotaries += [Rotary(frequencies.float(), layout, last) for last in (False, True) for layout in layouts]
    return rotaries


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).float().abs().max() / expected.float().abs().max())
