"""Sets of heads that are restored together: those with the highest and lowest index, and random ones of their layers.

Found on some prompts, they are to be tested on others: do they take away more of the damage than the random ones?
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.layers.layer_map import restored_together
from kvprobe.layers.suffix import Component
from kvprobe.layers.verdicts import verdicts
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import Rows, beside

POISON, FILTER = "poison", "filter"
"""The heads with the highest index, and those with the lowest."""
MATCHED = " (random)"
"""Added to the name of a set of heads: others of the same layers."""
CHOSEN, RANDOM = "chosen", "random"
ALL = "all"
"""All families of damage, each of which counts alike."""

HeadSets = Mapping[str, Sequence[Sequence[Component]]]
"""Sets of heads by the name of what they are; of random ones several."""


@checked_arguments
def head_sets(maps: Rows, top: AtLeastOne, draws: int, rng: np.random.Generator) -> HeadSets:
    """The `top` heads with the highest and with the lowest mean index (half of all heads at most), and so many draws of
    random heads of the same layers beside each.

    Args:
        maps: see `ranked_heads`.
    """
    ranked = ranked_heads(maps)
    top = min(top, len(ranked) // 2)
    chosen = {POISON: ranked[-top:], FILTER: ranked[:top]}
    avoided = {*ranked[-top:], *ranked[:top]}
    sets: dict[str, list[list[Component]]] = {}
    for name, heads in chosen.items():
        sets |= {name: [heads], name + MATCHED: [random_heads(heads, ranked, avoided, rng) for _ in range(draws)]}
    return sets


@checked_arguments
def restored_sets(
    model: Model, clean: KVCache, damaged: KVCache, suffix: Tokens | str, sets: HeadSets, *, kept: int = 1
) -> pd.DataFrame:
    """One row per set (`sort` is its name, `draw` its number): the `damage`, and what is left of it with the set
    `restored`; see `restored_together`."""
    places = [(sort, draw) for sort, groups in sets.items() for draw in range(len(groups))]
    groups = [group for of_sort in sets.values() for group in of_sort]
    damage, left = restored_together(model, clean, damaged, suffix, groups, kept=kept)
    return pd.DataFrame(places, columns=["sort", "draw"]).assign(damage=damage, restored=left)


def against_random(table: Rows) -> Rows:
    """Every set in its family of damage and, scaled by the family's mean damage, among `ALL`: whether its `heads` are
    `CHOSEN` or `RANDOM`, what is `gone` of the damage, and how much `beyond` random sets of the same prompt that is.

    Args:
        table: of `restored_sets`, with the `family` of the damage and the `prompt`.
    """
    random = table["sort"].str.endswith(MATCHED)
    sort, gone = table["sort"].str.removesuffix(MATCHED), table["damage"] - table["restored"]
    rows = table.assign(heads=np.where(random, RANDOM, CHOSEN), sort=sort, gone=gone)
    scale = rows.groupby("family")["damage"].transform("mean")
    every = rows.assign(family=ALL, gone=gone / scale, damage=rows["damage"] / scale)
    rows = pd.concat([rows, every], ignore_index=True)
    usual = beside(rows, "gone", {"heads": RANDOM}, ("prompt", "family", "sort"))
    return rows.assign(beyond=rows["gone"] - usual)


@checked_arguments
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


@checked_arguments
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
