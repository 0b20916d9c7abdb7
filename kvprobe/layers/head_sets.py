"""Sets of heads to be restored together: ranked by their index, and random ones of the same layers."""

from collections.abc import Collection, Sequence

import numpy as np

from kvprobe.layers.suffix import Component
from kvprobe.layers.verdicts import verdicts
from kvprobe.tidy import Rows


def ranked_heads(maps: Rows) -> list[Component]:
    """All heads by their mean index over families of damage, the lowest first; no family decides alone, and a head need
    not have a verdict.

    Args:
        maps: see `verdicts`.

    Raises:
        UserError: as `verdicts`.
    """
    indices: Rows = verdicts(maps[maps["kind"] == "head"]).set_index(["layer", "head"])["pi"]
    return [Component("head", int(layer), int(head)) for layer, head in indices.sort_values().index]


def random_heads(
    heads: Sequence[Component], every: Sequence[Component], avoided: Collection[Component], rng: np.random.Generator
) -> list[Component]:
    """Random heads, as many of each layer as `heads` has; `avoided` ones only where a layer has no others.

    Args:
        every: the heads to draw from.
    """
    drawn: list[Component] = []
    for layer in dict.fromkeys(head.layer for head in heads):
        of_layer = [head for head in every if head.layer == layer]
        others, spare = ([head for head in of_layer if (head in avoided) == again] for again in (False, True))
        shuffled = [group[place] for group in (others, spare) for place in rng.permutation(len(group))]
        drawn += shuffled[: sum(head.layer == layer for head in heads)]
    return drawn
