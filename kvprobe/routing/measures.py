"""How alike two routings of the same tokens are, and how evenly experts are used."""

from math import comb

import numpy as np
import pandas as pd
import torch

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError
from kvprobe.routing.reading import Routing


@checked_arguments
def agreement(one: Routing, other: Routing) -> pd.DataFrame:
    """How alike the routing of the same tokens at the same positions is in two runs.

    One row per layer, row and token: its index, position and text; `overlap`, the Jaccard index of the chosen experts;
    `jsd`, the Jensen-Shannon divergence of the softmax over all experts, in bits; `entropy` and `other_entropy`, as
    shares of the largest. What overlap two random choices have, `chance_overlap` says. The token at position 0 is often
    routed unlike all others, so leave it out of means.

    Raises:
        UserError: the tokens, their positions or the models are not the same.
    """
    if not (one.is_of(other.ids, other.present, other.made_by) and torch.equal(one.positions, other.positions)):
        raise UserError(
            "The two routings are of other tokens, positions or models; read the same tokens at the same positions "
            "with one model."
        )
    both = (one.members & other.members).sum(-1)
    overlap = both / (2 * one.chosen.shape[-1] - both)
    p, q = one.probabilities, other.probabilities
    middle = torch.special.entr((p + q) / 2).sum(-1)
    jsd = (middle - (torch.special.entr(p).sum(-1) + torch.special.entr(q).sum(-1)) / 2).clamp(min=0) / np.log(2)
    measured = {"overlap": overlap, "jsd": jsd, "entropy": one.entropy, "other_entropy": other.entropy}
    table = one.df()[["layer", "row", "token", "position", "text"]]
    return table.assign(**{name: values[:, one.present].flatten().tolist() for name, values in measured.items()})


@checked_arguments
def chance_overlap(experts: int, chosen: int) -> float:
    """The mean Jaccard index of two independent choices, each of `chosen` of the experts, all equally likely.

    Raises:
        UserError: no such choice exists.
    """
    if not 1 <= chosen <= experts:
        raise UserError(f"A token cannot go to {chosen} of {experts} experts; choose from 1 to all of them.")
    shared = range(max(0, 2 * chosen - experts), chosen + 1)
    ways = [comb(chosen, count) * comb(experts - chosen, chosen - count) for count in shared]
    jaccard = [count / (2 * chosen - count) for count in shared]
    return sum(way * index for way, index in zip(ways, jaccard, strict=True)) / comb(experts, chosen)


@checked_arguments
def load(routing: Routing) -> pd.DataFrame:
    """The share of tokens that each expert computes; one row per layer and expert, and `cv`, the coefficient of
    variation of the layer's shares: 0 where all experts are used alike."""
    shares = routing.members[:, routing.present].double().mean(1).cpu().numpy()
    tables = [
        pd.DataFrame({"layer": layer, "expert": range(routing.experts), "share": row, "cv": row.std() / row.mean()})
        for layer, row in zip(routing.layers, shares, strict=True)
    ]
    return pd.concat(tables, ignore_index=True)
