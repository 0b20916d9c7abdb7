"""Whether a model fits into memory, by its budget, before it is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvprobe.brief import plain_dtype
from kvprobe.errors import UserError
from kvprobe.files import read_json
from kvprobe.memory.budget import Budget, budget
from kvprobe.models.adapters import is_adapter
from kvprobe.models.files import MAX_JSON_BYTES, weight_sizes
from kvprobe.models.loading import base_folder, free_bytes
from kvprobe.models.placing import Placing
from kvprobe.units import MOST, both
from kvprobe.weights import bytes_in_memory

MARGIN = 0.05
"""By how much a need may exceed what is free before it is refused; budgets were never off by more (docs/results)."""
PROVED = 256
"""Tokens that the gate reads at once before anything else is read."""


def loading_bytes(folder: Path, dtype: torch.dtype, placing: Placing) -> int:
    """Bytes that a model in a folder takes at its peak while it is loaded and proved.

    The proof of a model in half precision has one weight after the other in float32.
    """
    fields: dict[str, Any] = dict(read_json(folder / "config.json", MAX_JSON_BYTES, "fetch it again"))
    rounded = placing.arguments(dtype).get("quantization_config")
    if rounded is not None:
        fields["quantization_config"] = rounded.to_dict()
    sizes = weight_sizes(folder)
    widest = max(sizes) * 4 if dtype.itemsize < 4 else 0
    # What is given to weights has room for the largest of those on disk, too.
    shares: dict[Any, int] = placing.arguments(dtype).get("max_memory") or {}
    most = shares.get("cpu", MOST)
    try:
        needs = budget(fields, context=PROVED, dtype=plain_dtype(dtype))
    except UserError:  # a family without a budget, whose weights are in its files
        return min(most, sum(sizes) * (1 if rounded is not None else dtype.itemsize)) + widest
    return needs.peak - max(0, needs.weights - most) + widest


def budget_of(plain: PreTrainedModel, name: str, dtype: torch.dtype, choices: dict[str, Any]) -> Budget:
    """The budget of a loaded model. Of weights on disk, those of one module are counted, as it is while it runs."""
    if choices["weights"] is None and choices["engine"] == "hf" and any(one.is_meta for one in plain.parameters()):
        choices = {**choices, "weights": bytes_in_memory(plain)}
    needed = budget(plain.config.to_dict(), dtype=plain_dtype(dtype), **choices)
    return replace(needed, config=replace(needed.config, name=name))


def check_loading(folder: Path, device: torch.device, dtype: torch.dtype, placing: Placing) -> Placing:
    """Refuse a model that does not fit into the free memory of its device; else, where its weights are to lie.

    Of an adapter, it is its base that is held against it. Where weights may lie on disk they always fit: without a GPU
    they are given the memory that what comes beside them leaves, and what was given to them must leave as much.

    Raises:
        UserError: it does not, by more than `MARGIN`.
    """
    shared = placing.max_memory is None and not torch.cuda.is_available() and isinstance(placing.device_map, str)
    if placing.mapped:
        if not shared and set(placing.max_memory or ()) != {"cpu"}:
            return placing
        device = torch.device("cpu")
    folder = base_folder(folder) if is_adapter(folder) else folder
    free = free_bytes(device)
    if 2 * sum(weight_sizes(folder)) * dtype.itemsize < free:
        return placing  # the budget itself takes a second
    if shared:
        least = replace(placing, max_memory={"cpu": 1})
        return replace(placing, max_memory={"cpu": max(1, free + 1 - loading_bytes(folder, dtype, least))})
    needed = loading_bytes(folder, dtype, placing)
    if needed > (1 + MARGIN) * free:
        smaller = "dtype='bfloat16', " if dtype.itemsize == 4 else ""
        rounded = "" if placing.quantization or placing.mapped else "quantization='int8', "
        spread = "less max_memory" if placing.mapped else "device_map='auto'"
        raise UserError(
            f"The weights of {folder.name} and what tests them need {both(needed)} as {plain_dtype(dtype)}, but "
            f"{both(free)} are free on {device}; use {smaller}{rounded}{spread} or a smaller model, or "
            "check_memory=False to try."
        )
    return placing
