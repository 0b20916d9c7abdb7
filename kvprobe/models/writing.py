"""The gate for what single heads write: is it their values times W_O?"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvprobe.cache.ledger import Ledger
from kvprobe.errors import UserError
from kvprobe.models.attending import Attending
from kvprobe.models.gate_caches import empty_cache
from kvprobe.models.hooks import Hook, bare, hooked
from kvprobe.models.rounding import difference, few_tokens
from kvprobe.models.unproved import UnprovedLanes


@bare()
def prove_writing(lanes: UnprovedLanes) -> None:
    """Prove on a few tokens that each output projection reads what the heads of its layer give, side by side.

    Only then is what a head adds to the residual stream its attention weights times its values times W_O.

    Raises:
        UserError: something stands between, such as a gate or a norm.
    """
    ids = few_tokens(lanes.plain)
    given: dict[int, Tensor] = {}
    worst = [0.0]

    def remember(inputs: Attending, computed: Float[Tensor, "rows queries heads d_value"]) -> None:
        given[inputs.layer] = computed.flatten(2)

    def comparing(layer: int) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        return lambda _, read, __: worst.append(difference(read[0], given[layer]))

    hooks: list[Hook] = [
        (lanes.output_projection(layer), "input", comparing(layer)) for layer in lanes.geometry.attending
    ]
    with torch.no_grad(), lanes.observing_attention_unproved(remember), hooked(hooks):
        lanes.unproved(ids, Ledger.of(ids), empty_cache(lanes), masked=True)
    if not max(worst) <= lanes.tolerance():
        raise UserError(
            f"{type(lanes.plain).__name__} changes what its heads give before it is multiplied with W_O, by a gate or "
            "a norm, so what a single head writes is not known; use its attention weights, or patch."
        )
