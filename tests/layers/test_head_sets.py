"""Heads ranked by their index, random heads of their layers, and what goes with the index, on made-up maps."""

from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.layers import Component, index_correlation, random_heads, ranked_heads

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
