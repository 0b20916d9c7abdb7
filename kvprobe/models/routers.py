"""Routers of a mixture of experts: the modules that say which experts compute each token, and with what weights."""

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
from kvprobe.models.hooks import Hook, bare, claimed, hooked
from kvprobe.models.unproved import UnprovedLanes


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

    plain: nn.Module
    modules: dict[int, nn.Module]

    @contextmanager
    def replaced_by(self, route: Route) -> Generator[None]:
        """While this lasts, every router of the plain lane says what `route` returns."""

        def after(layer: int, module: nn.Module, args: object, output: tuple[Tensor, Tensor, Tensor]) -> Decision:
            return route(layer, Decision(*output))

        hooks: list[Hook] = [(module, "output", partial(after, layer)) for layer, module in self.modules.items()]
        with claimed(self.plain), hooked(hooks):
            yield


@bare()
def routers_of(lanes: UnprovedLanes) -> Routers:
    """The routers of a model, once it is proved on a few tokens, layer by layer, that the experts do what they say.

    Routing as it was must change nothing. Every token sent to other experts of one layer must change the logits, and so
    must other weights of that layer's experts.

    Raises:
        UserError: the model has no experts, or routers that kvprobe cannot follow.
    """
    name = type(lanes.plain).__name__
    modules: dict[int, nn.Module] = {}
    for layer, block in enumerate(lanes.blocks):
        kinds = {module: type(module).__name__ for module in block.modules()}
        routers = [module for module, kind in kinds.items() if kind.endswith("TopKRouter")]
        if routers or any(kind.endswith("Experts") for kind in kinds.values()):
            if len(routers) != 1:
                raise UserError(
                    f"Layer {layer} of {name} sends tokens to experts in a way that kvprobe cannot follow; use another "
                    "model."
                )
            modules[layer] = routers[0]
    if not modules:
        raise UserError(f"{name} has no experts that kvprobe can find, so nothing is routed; use Mixtral, say.")
    routers = Routers(lanes.plain, modules)
    if not _followed(lanes, routers):
        raise UserError(
            f"The experts of {name} do not follow its routers in a way that kvprobe knows, so routing can be neither "
            "read nor changed; use another model."
        )
    return routers


def _followed(lanes: UnprovedLanes, routers: Routers) -> bool:
    """Whether the proof of `routers_of` holds."""
    ids = torch.arange(1, 9, device=lanes.device)[None] % embedded_tokens(lanes.plain)
    usual: dict[int, Decision] = {}

    def record(layer: int, decision: Decision) -> Decision:
        usual[layer] = Decision(*(part.clone() for part in decision))
        return decision

    def replay(layer: int, decision: Decision) -> Decision:
        return usual[layer]

    def to_other_experts(layer: int, decision: Decision) -> Decision:
        return usual[layer]._replace(chosen=(usual[layer].chosen + 1) % decision.logits.shape[1])

    def with_other_weights(layer: int, decision: Decision) -> Decision:
        return usual[layer]._replace(weights=usual[layer].weights / 2)

    def only_at(layer: int, route: Route) -> Route:
        return lambda other, decision: route(other, decision) if other == layer else decision

    def logits(route: Route) -> Tensor:
        with torch.no_grad(), routers.replaced_by(route):
            return lanes.native(ids).float()

    expected = logits(record)
    if set(usual) != set(routers.modules) or not all(_is_decision(said, ids.shape[1]) for said in usual.values()):
        return False
    noise = float((logits(replay) - expected).abs().max())
    allowed = 1e-5 if lanes.dtype == torch.float32 else 2e-2
    return noise <= allowed * float(expected.abs().max()) and all(
        float((logits(only_at(layer, route)) - expected).abs().max()) > 10 * noise
        for layer in routers.modules
        for route in (to_other_experts, with_other_weights)
    )


def _is_decision(said: Decision, tokens: int) -> bool:
    """Whether a router gave logits of all experts, weights and chosen experts, in this order, for each token."""
    logits, weights, chosen = said
    shaped = len(logits) == len(weights) == len(chosen) == tokens and weights.shape == chosen.shape
    return shaped and not chosen.is_floating_point() and 0 <= int(chosen.min()) <= int(chosen.max()) < logits.shape[1]
