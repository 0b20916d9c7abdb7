"""Attention masks made from a ledger, and how they reach each attention module.

They go to each module itself, because transformers builds one mask for all layers, and places sliding windows by slot index
instead of position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.visibility import additive, visible
from kvprobe.errors import UserError
from kvprobe.models.geometry import Geometry


def masks_of(ledger: Ledger, queries: int, geometry: Geometry, dtype: torch.dtype) -> list[Tensor]:
    """One additive mask per layer, shared between layers that see the same."""
    groups = geometry.n_heads // geometry.n_kv_heads
    made: dict[tuple[int, int | None], Tensor] = {}
    masks = []
    seen_by_window = {window: visible(ledger, queries, window) for window in dict.fromkeys(geometry.windows)}
    for layer, window in enumerate(geometry.windows):
        seen = seen_by_window[window]
        key = (layer if seen.shape[0] > 1 else 0, window)
        if key not in made:
            made[key] = additive(seen[key[0]], groups, dtype)
        masks.append(made[key])
    return masks


@contextmanager
def masks_given(modules: Sequence[nn.Module], masks: Sequence[Tensor] | None) -> Iterator[None]:
    """While this lasts, each attention module gets its own mask, whatever the model hands down."""
    if masks is None:
        yield
        return

    def giver(mask: Tensor) -> Any:
        def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            if "attention_mask" not in kwargs:
                raise UserError(f"{type(module).__name__} takes no attention mask by name; it cannot be given one.")
            return args, {**kwargs, "attention_mask": mask}

        return give

    # Where all layers see the same, the model hands it down itself.
    alike = all(mask is masks[0] for mask in masks)
    handles = [
        module.register_forward_pre_hook(giver(mask), with_kwargs=True)
        for module, mask in zip(modules, masks, strict=True)
        if not alike
    ]
    parts: list[Any] = [part for module in modules for part in module.modules()]
    tables: dict[Any, Tensor] = {part: part.bias for part in parts if _is_table(getattr(part, "bias", None))}
    for part, table in tables.items():
        part.bias = torch.ones_like(table[..., :1, :1]).expand_as(table)
    try:
        yield
    finally:
        for part, table in tables.items():
            part.bias = table
        for handle in handles:
            handle.remove()


def _is_table(bias: Any) -> bool:
    """Whether an attention module's `bias` is a table of who may see whom by slot (GPT-Neo's windows): our masks are whole,
    and go by position."""
    return isinstance(bias, Tensor) and bias.dtype == torch.bool and bias.dim() == 4
