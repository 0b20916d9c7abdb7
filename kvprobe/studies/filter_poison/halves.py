"""Which heads are restored together on the other half of the conversations: those with the highest and the lowest index
on one half, and random heads of the same layers."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvprobe.layers import Component, verdicts
from kvprobe.studies.filter_poison import Config
from kvprobe.tidy import Rows

NONE = "none"
"""The control: the clean cache in the place of the damaged one."""
POISON, FILTER = "poison", "filter"
MATCHED = " (random)"
"""Added to the name of a set of heads: others of the same layers."""

Heads = Mapping[str, Sequence[Sequence[Component]]]
"""Sets of heads to be restored together, by the name of what they are."""


def heads_by_half(maps: Rows, config: Config) -> dict[int, Heads]:
    """The heads with the highest and the lowest mean index on each half, and random heads of the same layers.

    Indices are means over families, so that no family decides alone; a head need not have a verdict.
    """
    known = maps[(maps["family"] != NONE) & (maps["kind"] == "head")]
    by_half: dict[int, Heads] = {}
    for half, of_half in known.groupby("half"):
        indices: Rows = verdicts(of_half).set_index(["layer", "head"])["pi"]
        mean = indices.sort_values()
        top = min(config.top, len(mean) // 2)
        every = [Component("head", int(layer), int(head)) for layer, head in mean.index]
        rng = np.random.default_rng([config.seed, 2, int(half)])
        taken = {*every[-top:], *every[:top]}
        sets: dict[str, list[list[Component]]] = {}
        for name, heads in ((POISON, every[-top:]), (FILTER, every[:top])):
            sets[name] = [heads]
            sets[name + MATCHED] = [_matched(heads, every, taken, rng) for _ in range(config.random)]
        by_half[int(half)] = sets
    return by_half


def _matched(
    heads: Sequence[Component], every: Sequence[Component], taken: set[Component], rng: np.random.Generator
) -> list[Component]:
    """As many heads of each layer, none of which was chosen while there are others."""
    drawn: list[Component] = []
    for layer in dict.fromkeys(head.layer for head in heads):
        of_layer = [head for head in every if head.layer == layer]
        others, spare = ([head for head in of_layer if (head in taken) == was_taken] for was_taken in (False, True))
        shuffled = [group[place] for group in (others, spare) for place in rng.permutation(len(group))]
        drawn += shuffled[: sum(head.layer == layer for head in heads)]
    return drawn
