"""Contributions: what heads write into the residual stream for what they read in some slots.

Attention weights show where a head looks; a contribution shows how much it takes from there (Kobayashi et al. 2020,
arXiv 2004.10102).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.attention.patterns import Patterns, refuse_missing
from kvprobe.brief import Brief
from kvprobe.cache.layer import named
from kvprobe.errors import UserError
from kvprobe.inference.model import Model


@dataclass(frozen=True, repr=False)
class Contribution(Brief):
    """Norms relative to that of the layer's whole attention output, before any bias.

    Attributes:
        heads: ‖Σ_j α_j W_O v_j‖ of each head over the slots.
        layers: of all heads' sum over the slots, which can be less than any single head's where heads cancel.
    """

    heads: Float[Tensor, "layers heads queries"]
    layers: Float[Tensor, "layers queries"]


@checked_arguments
def contribution(model: Model, patterns: Patterns, slots: Sequence[int] | Int[Tensor, "chosen"]) -> Contribution:
    """How much of each layer's attention output is what it reads in these slots.

    Raises:
        UserError: there is no such slot, or W_O is not known (see `Lanes.output_weights`).
    """
    heads, layers = [], []
    everywhere = range(patterns.cache.slots)
    for layer in patterns.layers:
        from_slots = written(model, patterns, slots, layer)
        whole = written(model, patterns, everywhere, layer).sum(0).norm(dim=-1)
        heads.append(from_slots.norm(dim=-1) / whole)
        layers.append(from_slots.sum(0).norm(dim=-1) / whole)
    return Contribution(torch.stack(heads), torch.stack(layers))


@checked_arguments
def written(
    model: Model, patterns: Patterns, slots: Sequence[int] | Int[Tensor, "chosen"], layer: int
) -> Float[Tensor, "heads queries d_model"]:
    """Σ_j α_j W_O v_j over these slots: what each head of a layer adds to each query for what it reads there, in fp32.

    Over all slots and heads it sums to the layer's attention output before bias, and before any norm after it (Gemma).

    Raises:
        UserError: the patterns do not have this layer, there is no such slot, or see `Lanes.output_weights`.
    """
    if layer not in patterns.layers:
        raise UserError(f"The patterns are of layers {list(patterns.layers)}, not of {layer}; ask `attend` for it.")
    index = refuse_missing(patterns, slots)
    place = patterns.layers.index(layer)
    stored = patterns.cache.layers[(patterns.sources or patterns.layers)[place]]
    values = named(stored, "V")[0][:, index].float()
    weights = patterns.weights[place][..., index].unflatten(0, (values.shape[0], -1))
    mixed = torch.einsum("kgqs,ksd->kgqd", weights, values).flatten(0, 1)
    return torch.einsum("hqd,hdm->hqm", mixed, model.lanes.output_weights(layer).float())
