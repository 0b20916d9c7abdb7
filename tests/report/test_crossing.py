"""Where estimates cross a limit along a scale."""

import numpy as np
import pytest

from kvprobe.report.crossing import crossings, least_within, until_below
from kvprobe.report.findings import Finding
from kvprobe.stats import Estimate


def test_the_crossing_is_where_the_line_meets_the_tolerance():
    memory = np.array([1.0, 0.5, 0.2])
    losses = np.array([[0.0, 0.0, 0.1], [0.0, 0.2, 0.0], [0.0, 0.0, 0.0], [0.1, 0.0, 0.0]])
    np.testing.assert_allclose(crossings(memory, losses, 0.05, True), [0.35, 0.875, 0.2, np.inf])
    np.testing.assert_allclose(crossings(memory, losses, 0.05, False), [0.5, 1.0, 0.2, np.inf])
    losses[1, 2] = np.nan
    np.testing.assert_allclose(crossings(memory, losses, 0.05, True), [0.35, np.nan, 0.2, np.inf])


def test_the_interval_of_a_crossing_is_between_those_of_the_losses_ends():
    falling = [Estimate(0.0, -0.1, 0.0, 9), Estimate(0.1, 0.0, 0.2, 8)]
    assert least_within([1.0, 0.5], falling, 0.05) == Estimate(0.75, 0.5, 0.875, 8)
    never = least_within([1.0, 0.5], [Estimate(0.0, -0.1, 0.1, 9)] * 2, 0.05)
    assert (never.mean, never.low, never.clusters) == (0.5, 0.5, 9)
    assert np.isnan(never.high)
    without = least_within([1.0, 0.5], [Estimate(0.0, clusters=3)] * 2, 0.05)
    assert (without.mean, without.clusters) == (0.5, 0)


@pytest.mark.parametrize(
    ("highs", "expected"),
    [((0.1, -0.1, -0.1), (1.0, 2.0)), ((-0.1, 0.1, 0.1), (None, 1.0)), ((0.1, 0.1, 0.1), (3.0, None))],
)
def test_a_value_is_harmless_up_to_the_first_that_is_significantly_below_zero(
    highs: tuple[float, ...], expected: tuple[float | None, float | None]
):
    findings = [
        Finding("lost", {"rate": rate}, Estimate(high - 0.2, high - 0.4, high, 9)) for rate, high in enumerate(highs, 1)
    ]
    assert until_below(findings, "rate") == expected
