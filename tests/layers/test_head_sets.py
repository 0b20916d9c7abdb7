"""Heads ranked by their index, random heads of their layers, and what goes with the index, on made-up maps."""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.layers import Component, against_random, head_sets, index_correlation, random_heads, ranked_heads
from kvprobe.layers.head_sets import ALL, CHOSEN, FILTER, MATCHED, POISON, RANDOM
from tests.refusals import refused

PI = {(0, 0): 0.4, (0, 1): 0.1, (0, 2): -0.1, (1, 0): -0.4, (1, 1): 0.0, (1, 2): 0.2}


def maps(damage: dict[str, float], prompts: int = 8) -> Any:
    """Heads with these indices, in families with so much damage."""
    rows = [
        {"kind": "head", "layer": layer, "head": head, "prompt": prompt, "family": family, "damage": amount}
        | {"restored": amount * (1 - pi), "pi": pi}
        for (family, amount), prompt, ((layer, head), pi) in product(damage.items(), range(prompts), PI.items())
    ]
    return pd.DataFrame(rows)


def head(layer: int, number: int) -> Component:
    return Component("head", layer, number)


def test_heads_are_ranked_by_their_mean_index_whatever_the_size_of_the_damage():
    table = maps({"zeros": 1.0, "false": 20.0})
    turned = (table["family"] == "zeros") & (table["layer"] == 1)
    table.loc[turned, "restored"] = 2 * table["damage"]
    # In layer 1 the index is -1 in one family: means of it and that of the other.
    means = PI | {(1, number): (PI[1, number] - 1) / 2 for number in range(3)}
    assert ranked_heads(table) == [head(*place) for place in sorted(means, key=means.__getitem__)]


def test_random_heads_are_as_many_of_each_layer_and_avoided_ones_only_for_want_of_others():
    every = [head(*place) for place in PI]
    chosen = [head(0, 0), head(1, 0), head(1, 1)]
    draws = [random_heads(chosen, every, chosen, np.random.default_rng(seed)) for seed in range(20)]
    for drawn in draws:
        assert [one.layer for one in drawn] == [0, 1, 1]
        assert drawn[1] == head(1, 2)
        assert drawn[0] != head(0, 0)
        assert len({*drawn}) == 3
    assert len({*map(tuple, draws)}) == 4


def test_what_orders_heads_as_their_index_correlates_with_it():
    table = maps({"zeros": 1.0})
    noise = np.random.default_rng(0).normal(size=len(table))
    # Only one prompt has the second column, and the third is the same for all heads of a layer.
    table = table.assign(mass=table["pi"], lift=table["pi"].mask(table["prompt"] != 0), layer_alone=table["layer"])
    assert index_correlation(table, "mass") == pytest.approx([1.0] * 9)
    assert index_correlation(table, "lift")[[0, 2]] == pytest.approx([1.0, 1.0])
    assert np.isnan(index_correlation(table, "lift")[1])
    assert np.isnan(index_correlation(table, "layer_alone", within_layers=True)).all()
    assert index_correlation(table, "layer_alone")[0] < 0
    table = table.assign(mass=-table["pi"] + 10 * table["layer"] + 1e-3 * noise)
    assert index_correlation(table, "mass", within_layers=True)[0] == pytest.approx(-1.0)
    assert index_correlation(table, "mass")[0] > -0.9


def test_sets_are_the_extremes_and_random_heads_of_their_layers():
    sets = head_sets(maps({"zeros": 1.0, "false": 20.0}), 1, 6, np.random.default_rng(0))
    for sort, layer in ((POISON, 0), (FILTER, 1)):
        assert sets[sort] == [[head(layer, 0)]]
        assert len(sets[sort + MATCHED]) == 6
        assert {one for [one] in sets[sort + MATCHED]} == {head(layer, 1), head(layer, 2)}
    [half_of_all] = head_sets(maps({"zeros": 1.0, "false": 20.0}), 9, 1, np.random.default_rng(0))[POISON]
    assert len(half_of_all) == 3
    refused(lambda: head_sets(maps({"zeros": 1.0}), 0, 1, np.random.default_rng(0)), "top=0")


def test_each_family_counts_alike_among_all_and_random_sets_of_the_same_prompt_are_taken_away():
    """One family has twenty times the damage of the other, and nothing of it goes away."""
    rows = [
        {"sort": sort, "draw": draw, "family": family, "prompt": prompt, "damage": damage * (1 + prompt)}
        | {"restored": damage * (1 + prompt) * (1 - gone * (family == "zeros"))}
        for family, damage in {"zeros": 1.0, "false": 20.0}.items()
        for prompt in range(3)
        for sort, gones in {POISON: [0.5], POISON + MATCHED: [0.0, 0.2]}.items()
        for draw, gone in enumerate(gones)
    ]
    found: Any = against_random(pd.DataFrame(rows)).groupby(["family", "heads"])[["gone", "beyond", "damage"]].sum()
    shares = found["gone"] / found["damage"]
    assert shares[ALL, CHOSEN] == pytest.approx(shares["zeros", CHOSEN] / 2) == 0.25
    assert shares[ALL, RANDOM] == pytest.approx(0.05)
    assert found.loc[("zeros", CHOSEN), "beyond"] == pytest.approx((0.5 - 0.1) * 6)
