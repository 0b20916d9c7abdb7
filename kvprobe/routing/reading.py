"""Read text and record where each token is routed; or read it routed as another run was."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.fingerprint import Maker
from kvprobe.inference.forward import extend, new_slots, prove_reading
from kvprobe.inference.model import Model
from kvprobe.inference.rows import Readable
from kvprobe.models.routers import Decision
from kvprobe.text.tokens import token_texts


@dataclass(frozen=True, repr=False)
class Routing(Brief):
    """Where the tokens of one read were routed.

    Attributes:
        layers: those that have a router.
        logits: of all experts.
        weights: of the chosen experts' outputs.
        chosen: their numbers.
        ids: the tokens.
        positions: of the tokens.
        present: false where a row is shorter than the longest and its entry is padding.
        texts: the tokens of each row as text; ids where the model has no tokenizer.
        made_by: the model that routed them.
    """

    layers: tuple[int, ...]
    logits: Float[Tensor, "layers rows tokens experts"]
    weights: Float[Tensor, "layers rows tokens chosen"]
    chosen: Int[Tensor, "layers rows tokens chosen"]
    ids: Int[Tensor, "rows tokens"]
    positions: Int[Tensor, "rows tokens"]
    present: Bool[Tensor, "rows tokens"]
    texts: tuple[tuple[str, ...], ...] = field(repr=False)
    made_by: Maker = field(repr=False, compare=False)

    def _facts(self) -> Iterable[str]:
        yield f"{int(self.present.sum())} tokens in {len(self.ids)} rows"
        yield f"{len(self.layers)} layers of {self.experts} experts, {self.chosen.shape[-1]} for each token"

    @property
    def experts(self) -> int:
        return self.logits.shape[-1]

    @property
    def probabilities(self) -> Float[Tensor, "layers rows tokens experts"]:
        """The softmax over all experts, also where the model takes it over the chosen ones only."""
        return self.logits.float().softmax(-1)

    @property
    def members(self) -> Bool[Tensor, "layers rows tokens experts"]:
        """Whether each expert computes each token."""
        return torch.zeros_like(self.logits, dtype=torch.bool).scatter(-1, self.chosen, True)

    @property
    def entropy(self) -> Float[Tensor, "layers rows tokens"]:
        """Of the softmax over all experts, as a share of the largest that is possible: 0 is certain, 1 is even."""
        probabilities = self.probabilities
        return torch.special.entr(probabilities).sum(-1) / torch.log(torch.tensor(float(self.experts)))

    def is_of(self, ids: Int[Tensor, "rows tokens"], present: Bool[Tensor, "rows tokens"], model: Maker) -> bool:
        """Whether it is of these tokens, by this model."""
        same = torch.equal(self.ids.cpu(), ids.cpu()) and torch.equal(self.present.cpu(), present.cpu())
        return same and self.made_by.same(model)

    def df(self) -> pd.DataFrame:
        """One row per layer, row and token: its index, position and text, the chosen experts from the heaviest on,
        their weights, and the entropy."""
        order = self.weights.argsort(-1, descending=True)
        chosen, weights = self.chosen.gather(-1, order).tolist(), self.weights.float().gather(-1, order).tolist()
        entropy = self.entropy.tolist()
        return pd.DataFrame(
            [
                {
                    "layer": layer,
                    "row": row,
                    "token": token,
                    "position": int(self.positions[row, token]),
                    "text": text,
                    "experts": tuple(chosen[place][row][token]),
                    "weights": tuple(weights[place][row][token]),
                    "entropy": entropy[place][row][token],
                }
                for place, layer in enumerate(self.layers)
                for row, texts in enumerate(self.texts)
                for token, text in enumerate(texts)
            ]
        )


@dataclass(frozen=True, repr=False)
class Routed(Brief):
    """What a read gives.

    Attributes:
        routing: what the routers said, also where the experts followed another run.
        logits: after the last tokens of each row.
        cache: the longer cache.
    """

    routing: Routing
    logits: Float[Tensor, "rows last vocab"]
    cache: KVCache


@checked_arguments
def read(
    model: Model,
    text: Readable,
    past: KVCache | None = None,
    *,
    routing: Routing | None = None,
    layers: Sequence[int] | None = None,
    logits: int = 1,
) -> Routed:
    """Read `text` (after `past`), and record where each token is routed.

    Args:
        text: as `Model.extend` takes it.
        routing: of the same tokens in another run: the experts of that run compute them, with its weights.
        layers: where `routing` holds; all that have routers by default.
        logits: last tokens of each row to return logits for.

    Raises:
        UserError: the model has no experts, or routers that kvprobe cannot follow; `routing` is of other tokens or of
            another model; a layer without a router.
    """
    lanes = model.lanes
    routers = lanes.routers
    tokens = model.tokens_after(past, text)
    new = new_slots(tokens, lanes.device)
    present = new.live[0, :, 0]
    held = _held(tuple(routers.modules), layers, routing)
    if routing is not None and not routing.is_of(new.tokens, present, lanes.maker):
        raise UserError("The routing is of other tokens or of another model; record it of the same tokens.")
    decisions: dict[int, Decision] = {}

    def route(layer: int, decision: Decision) -> Decision:
        if layer in decisions:
            raise UserError(f"The router of layer {layer} was asked twice in one pass, which kvprobe cannot follow.")
        decisions[layer] = Decision(*(part.detach().clone() for part in decision))
        if routing is None or layer not in held:
            return decision
        place = routing.layers.index(layer)
        return Decision(
            routing.logits[place].flatten(0, 1).to(decision.logits),
            routing.weights[place].flatten(0, 1).to(decision.weights),
            routing.chosen[place].flatten(0, 1).to(decision.chosen),
        )

    prove_reading(lanes, past, tokens)
    with routers.replaced_by(route):
        cache, scores = extend(lanes, past, tokens, logits=logits, chunk=new.slots)

    def stacked(part: int) -> Tensor:
        return torch.stack([decisions[layer][part].unflatten(0, new.tokens.shape) for layer in routers.modules])

    texts = tuple(token_texts(row.ids, model.tokenizer) or tuple(map(str, row.ids)) for row in tokens)
    recorded = Routing(
        tuple(routers.modules),
        stacked(0),
        stacked(1),
        stacked(2),
        new.tokens,
        new.positions,
        present,
        texts,
        lanes.maker,
    )
    return Routed(recorded, scores, cache)


def _held(known: Sequence[int], layers: Sequence[int] | None, routing: Routing | None) -> set[int]:
    """The layers at which a given routing holds."""
    if layers is None:
        return set(known)
    if routing is None:
        raise UserError("`layers` says where a given routing holds; give `routing` too, or leave it out.")
    for layer in layers:
        if layer not in known:
            raise UserError(f"Layer {layer} has no router; the layers that have one are {', '.join(map(str, known))}.")
    return set(layers)
