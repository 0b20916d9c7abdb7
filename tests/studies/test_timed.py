"""How a token's time grows with the length."""

import numpy as np
import pytest

from kvprobe.studies.memory.timed import power_of_length


def test_the_power_of_the_length_is_that_over_its_longer_half():
    lengths = np.array([64.0, 128, 256, 512])
    seconds = np.stack([1e-3 * np.maximum(lengths, 256) ** 2, np.ones(4)])
    assert power_of_length(lengths, seconds).tolist() == pytest.approx([2.0, 0.0], abs=1e-9)
