"""Attention masks made from a ledger, and given to each attention module.

Transformers builds one mask for all layers, and places sliding windows by slot index instead of position, so each
module gets its own mask from kvprobe.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import cycle

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from kvprobe.cache.ledger import Ledger
from kvprobe.cache.visibility import additive, visible_by_layer
from kvprobe.errors import UserError
from kvprobe.models.geometry import Geometry
from kvprobe.models.hooks import Hook, hooked
from kvprobe.restoring import restoring


def masks_of(
    ledger: Ledger,
    queries: int,
    geometry: Geometry,
    dtype: torch.dtype,
    hidden: Bool[Tensor, "batch queries slots"] | None = None,
) -> list[Tensor]:
    """One additive mask per attention module; those that see the same slots share one tensor.

    Args:
        hidden: slots that a query does not see, beside those that are not live; never its own.
    """
    # Where layers differ in their heads, masks by head do not come here.
    groups = geometry.n_heads // geometry.n_kv_heads if ledger.live.shape[2] > 1 else 1
    seen = visible_by_layer(ledger, queries, geometry.reaches)
    shared: dict[int, Tensor] = {}
    for layer in seen:
        if id(layer) not in shared:
            shared[id(layer)] = additive(layer if hidden is None else layer & ~hidden[:, None], groups, dtype)
    return [shared[id(seen[source])] for source in geometry.sources]


@contextmanager
def masks_given(modules: Sequence[nn.Module], masks: Sequence[Tensor] | None) -> Generator[None]:
    """While this lasts, each attention module gets its own mask instead of the one that the model passes to it.

    A module that a model calls several times stands as often among them, and gets its masks in turn.
    """
    if masks is None:
        yield
        return

    def hook_giving(masks: Sequence[Tensor]) -> Callable[..., tuple[object, dict[str, object]]]:
        turns = cycle(masks)

        def hook(module: nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
            if "attention_mask" not in kwargs:
                raise UserError(
                    f"{type(module).__name__} has no argument attention_mask, so kvprobe cannot mask slots in it."
                )
            return args, {**kwargs, "attention_mask": next(turns)}

        return hook

    # Where all layers see the same slots, the model passes the one mask on itself.
    alike = all(mask is masks[0] for mask in masks)
    by_module: dict[nn.Module, list[Tensor]] = {}
    for module, mask in zip(modules, masks, strict=True):
        by_module.setdefault(module, []).append(mask)
    hooks: list[Hook] = [(module, "input", hook_giving(of_module)) for module, of_module in by_module.items()]
    submodules = [submodule for module in modules for submodule in module.modules()]
    tables = {submodule: bias for submodule in submodules if (bias := _slot_table(submodule)) is not None}

    def put_back() -> None:
        for submodule, table in tables.items():
            submodule.bias = table

    with hooked([] if alike else hooks), restoring(put_back):
        for submodule, table in tables.items():
            submodule.bias = torch.ones_like(table[..., :1, :1]).expand_as(table)
        yield


def _slot_table(module: nn.Module) -> Tensor | None:
    """A module's own table of visible slots by index (GPT-Neo's windows), which kvprobe's masks by position replace."""
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, Tensor) and bias.dtype == torch.bool and bias.dim() == 4 else None
