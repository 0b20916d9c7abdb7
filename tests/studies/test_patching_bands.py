"""Bands of layers that hold most of an effect."""

import numpy as np
import pandas as pd
import pytest

from kvprobe.patching.pairs import agreements
from kvprobe.studies.patching.bands import band_of, bands_by_half, profile


@pytest.mark.parametrize(
    ("effects", "band"),
    [
        ([0.0, 0.1, 0.5, 0.4, 0.0], range(2, 4)),
        ([0.5, 0.0, 0.5], range(0, 3)),
        ([-0.2, 0.6, 0.6, -0.1], range(1, 3)),
        ([-0.5, 0.2], None),
    ],
)
def test_a_band_is_the_smallest_run_that_holds_its_share(effects: list[float], band: range | None):
    assert band_of(np.array(effects)) == band


def cells(effects: dict[tuple[str, int], list[float]], pairs: int = 4) -> pd.DataFrame:
    """Single layers of two segments, each with half of these effects, of parts and halves; pairs have ways of their
    own."""
    return pd.DataFrame(
        {"pair": pair, "cluster": f"f{pair}", "half": half, "part": part, "layer": layer, "segment": segment}
        | {"way": -1.0 - pair, "effect": (-1.0 - pair) * effect / 2}
        for (part, half), by_layer in effects.items()
        for pair in range(half, pairs, 2)
        for layer, effect in enumerate(by_layer)
        for segment in ("value", "T2")
    )


def test_a_profile_is_the_share_of_the_way_by_layer_summed_over_segments():
    table = cells({("K", 0): [0.1, 0.4, 0.0], ("V", 0): [0.0, 0.0, 0.9]})
    assert profile(table, "K", 4) == pytest.approx([0.1, 0.4, 0.0, 0.0])


def test_bands_are_found_on_each_half_where_both_lead_toward_the_donor():
    table = cells(
        {("K", 0): [0.1, 0.4, 0.0], ("K", 1): [0.0, 0.3, 0.3], ("V", 0): [0.0, 0.5, 0.0], ("V", 1): [-0.5, 0.2, 0.0]}
    )
    assert bands_by_half(table, 3) == {"K": {0: range(1, 2), 1: range(1, 3)}}
    assert bands_by_half(table, 3, fewest=5) == {}
    assert bands_by_half(table[table["half"] == 0], 3, fewest=2) == {}


def test_scores_agree_with_exact_effects_pair_by_pair():
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"pair": np.repeat([0, 1, 2], 6), "effect": [*rng.normal(size=12), *[1.0] * 6]})
    table = table.assign(score=table["effect"] ** 3, linear=-table["effect"])
    table.loc[[0, 1], "effect"] = np.nan
    assert agreements(table, "score") == pytest.approx([1.0, 1.0])
    assert agreements(table, "linear") == pytest.approx([-1.0, -1.0])
