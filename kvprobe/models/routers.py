"""Routers of a mixture of experts: the modules that say which experts compute each token, and with what weights."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvprobe.errors import UserError
from kvprobe.models.geometry import embedded_tokens
from kvprobe.models.unproved import UnprovedLanes

_EXPERTS = re.compile("expert|router|moe", re.IGNORECASE)
"""In names of modules that only a mixture of experts has."""


class Decision(NamedTuple):
    """A router's decision on each token.

    Attributes:
        logits: of all experts.
        weights: of the chosen experts' outputs.
        chosen: their numbers.
    """

    logits: Float[Tensor, "tokens experts"]
    weights: Float[Tensor, "tokens chosen"]
    chosen: Int[Tensor, "tokens chosen"]


Route = Callable[[int, Decision], Decision]
"""What is done instead, from the layer and what its router says."""


@dataclass(frozen=True)
class Routers:
    """The routers of a model, by layer."""

    modules: dict[int, nn.Module]

    @contextmanager
    def replaced_by(self, route: Route) -> Generator[None]:
        """While this lasts, every router of the plain lane says what `route` returns."""

        def after(layer: int, module: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> Decision:
            return route(layer, Decision(*output))

        handles = [module.register_forward_hook(partial(after, layer)) for layer, module in self.modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def routers_of(lanes: UnprovedLanes) -> Routers:
    """The routers of a model, once it is proved on a few tokens that the experts do what they say.

    Routing as it was must change nothing, and every token sent to other experts must change the logits.

    Raises:
        UserError: the model has no experts, or routers that kvprobe cannot follow.
    """
    name = type(lanes.plain).__name__
    modules: dict[int, nn.Module] = {}
    for layer, block in enumerate(lanes.blocks):
        routers = [module for module in block.modules() if type(module).__name__.endswith("TopKRouter")]
        if len(routers) > 1:
            raise UserError(f"{name} has {len(routers)} routers in layer {layer}, of which kvprobe can follow one.")
        if routers:
            modules[layer] = routers[0]
    if not modules:
        if any(_EXPERTS.search(type(module).__name__) for block in lanes.blocks for module in block.modules()):
            raise UserError(f"The routers of {name} are built in a way that kvprobe cannot follow; use another model.")
        raise UserError(f"{name} is no mixture of experts, so nothing is routed; use Mixtral or OLMoE, say.")
    routers = Routers(modules)
    _prove(lanes, routers)
    return routers


def _prove(lanes: UnprovedLanes, routers: Routers) -> None:
    ids = torch.arange(1, 9, device=lanes.device)[None] % embedded_tokens(lanes.plain)
    said: dict[int, Decision] = {}
    refusal = UserError(
        f"The experts of {type(lanes.plain).__name__} do not follow what its routers say in a way that kvprobe knows, "
        "so routing can be neither read nor changed; use another model."
    )

    def record(layer: int, decision: Decision) -> Decision:
        tokens = ids.shape[1]
        logits, weights, chosen = decision
        if not (len(logits) == len(weights) == len(chosen) == tokens and weights.shape == chosen.shape):
            raise refusal
        if chosen.is_floating_point() or int(chosen.max()) >= logits.shape[1]:
            raise refusal
        said[layer] = Decision(*(part.clone() for part in decision))
        return decision

    def replay(layer: int, decision: Decision) -> Decision:
        return said[layer]

    def elsewhere(layer: int, decision: Decision) -> Decision:
        logits, weights, chosen = said[layer]
        return Decision(logits, weights, (chosen + 1) % logits.shape[1])

    def logits(route: Route) -> Tensor:
        with torch.no_grad(), routers.replaced_by(route):
            return lanes.native(ids).float()

    usual = logits(record)
    if set(said) != set(routers.modules):
        raise refusal
    scale = float(usual.abs().max())
    same, moved = (float((logits(route) - usual).abs().max()) / scale for route in (replay, elsewhere))
    allowed = 1e-5 if lanes.dtype == torch.float32 else 2e-2
    if not same <= allowed < moved:
        raise refusal
