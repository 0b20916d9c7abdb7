"""The weights of a published probe on disk, in safetensors. They are untrusted input, read within limits and without
pickle."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.files import write_whole
from kvprobe.fingerprint import digest
from kvprobe.names import one_line
from kvprobe.probes.card import WEIGHTS, Card
from kvprobe.probing.linear import LinearProbes

MAX_WEIGHTS = 2**28
"""The largest file that is read, in bytes."""


def write_weights(linear: LinearProbes, deviation: Float[Tensor, "dim"], folder: Path, card: Card) -> Card:
    """Write one probe and the deviations of its features, and return the card with their digest."""
    tensors = {
        "mean": linear.mean[0],
        "weights": linear.weights[0],
        "intercept": linear.intercept[0],
        "deviation": deviation,
    }
    content = save({name: tensor.float().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_whole(folder / WEIGHTS, content)
    return replace(card, digest=digest([content], 16))


def read_weights(folder: Path, card: Card) -> tuple[LinearProbes, Float[Tensor, "dim"]]:
    """What `write_weights` wrote.

    Raises:
        UserError: there is no file, or it is too large, truncated, holds other tensors than the card describes, or has
        another digest.
    """
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} has a card but no {WEIGHTS}; copy the whole folder.")
    if path.stat().st_size > MAX_WEIGHTS:
        raise UserError(
            f"{path} is larger than {MAX_WEIGHTS // 2**20} MiB, the limit for a probe; copy the folder again."
        )
    outputs = len(card.target.places) * len(card.target.classes)
    try:
        with safe_open(path, framework="pt") as file:
            slices: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            dim = (slices["weights"].get_shape() or [0])[0] if "weights" in slices else 0
            shapes = {"mean": [dim], "weights": [dim, outputs], "intercept": [outputs], "deviation": [dim]}
            if {name: piece.get_shape() for name, piece in slices.items()} != shapes or not dim:
                raise UserError(
                    f"{path} does not hold the weights of {outputs} outputs that its card describes; publish the probe "
                    "again."
                )
            tensors = {name: file.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise UserError(f"{path} is truncated or not a safetensors file ({one_line(error)}); copy it again.") from error
    if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
        raise UserError(f"{path} holds numbers that are not float32; publish the probe again.")
    deviation = tensors.pop("deviation")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()) or not bool(
        (deviation > 0).all() and deviation.isfinite().any()
    ):
        raise UserError(
            f"{path} holds numbers that are not finite, or deviations that are not above zero; publish the probe again."
        )
    if digest([path.read_bytes()], 16) != card.digest:
        raise UserError(f"{path} does not match the digest in its card; copy the whole folder again.")
    batch = {name: tensor[None] for name, tensor in tensors.items()}
    return LinearProbes(**batch, classes=len(card.target.classes)), deviation
