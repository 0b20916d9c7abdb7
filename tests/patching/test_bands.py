"""Bands of layers that hold most of an effect."""

import numpy as np
import pytest

from kvprobe.patching.bands import band_of


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
