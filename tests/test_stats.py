"""Intervals: the jackknife equals a slow loop, covers where a bootstrap does not, and gives none from few clusters."""

import json

import numpy as np
import pytest
from scipy import stats as reference

from kvprobe.stats import (
    DIFFERENCE,
    FEWEST,
    SHARE,
    Estimate,
    effective,
    estimate,
    interval,
    jackknife,
    leave_one_out,
    means,
    newcombe,
    ratio,
    wilson,
)
from kvprobe.wording import percent, plain, points, signed, two_digits
from tests.refusals import refused


def test_replicates_equal_a_slow_loop_that_leaves_each_cluster_out():
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(9), [3, 1, 4, 2, 5, 1, 2, 3, 4])
    values = rng.random((2, len(clusters)))
    mean, low, high = means(values, clusters)
    np.testing.assert_allclose(mean, values.mean(1))
    without = np.array([[row[clusters != left].mean() for left in range(9)] for row in values])
    np.testing.assert_allclose(
        np.stack([low, high]), np.stack(interval(values.mean(1), without, weights=np.bincount(clusters)))
    )
    for row, ends in zip(values, np.stack([low, high], 1), strict=True):
        alone = estimate(row, clusters)
        np.testing.assert_allclose((alone.low, alone.high), ends)
        sums, sizes = np.bincount(clusters, row), np.bincount(clusters)
        weights = leave_one_out(9)
        np.testing.assert_allclose(
            jackknife(row.mean(), weights @ sums / (weights @ sizes), weights=sizes).low, ends[0]
        )


def test_symmetric_independent_values_have_students_interval():
    values = np.array([-4.0, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4]) + 7
    estimated = estimate(values)
    expected = reference.t.interval(0.95, 9, loc=values.mean(), scale=reference.sem(values))
    assert (estimated.low, estimated.high) == pytest.approx(expected)
    assert (estimated.smallest, estimated.largest, estimated.clusters) == pytest.approx((3.0, 11.0, 10))


def test_the_end_on_the_side_of_the_long_tail_is_moved_out_and_the_other_is_not():
    values = np.array([1.0, 1, 1, 2, 2, 2, 3, 3, 4, 15])
    expected = reference.t.interval(0.95, 9, loc=values.mean(), scale=reference.sem(values))
    estimated, mirrored = estimate(values), estimate(-values)
    assert estimated.low == pytest.approx(expected[0])
    assert estimated.high > expected[1]
    assert (mirrored.low, mirrored.high) == pytest.approx((-estimated.high, -estimated.low))


@pytest.mark.parametrize("clusters", [1, 2, FEWEST - 1])
def test_few_clusters_have_a_range_and_no_interval_and_support_no_claim(clusters: int):
    values = np.linspace(5, 6, clusters)
    estimated = estimate(values)
    assert not estimated.has_interval
    assert not any((estimated.above(0.0), estimated.below(10.0), estimated.differs(0.0)))
    assert (estimated.smallest, estimated.largest) == pytest.approx((values.min(), values.max()))
    written = plain(estimated)
    assert "range" in written
    assert f"over {clusters}; too few for an interval" in written
    record = json.loads(json.dumps(estimated.record(), allow_nan=False))
    assert record["low"] is None


def test_claims_and_intervals_agree():
    estimated = Estimate(0.5, 0.2, 0.8)
    assert (estimated.above(0.1), estimated.differs(0.1), estimated.above(0.2)) == (True, True, False)
    assert (estimated.below(0.9), estimated.below(0.8), estimated.differs(0.5)) == (True, False, False)
    rest = estimated.complement()
    assert (rest.low, rest.high) == pytest.approx((0.2, 0.8))
    assert ((-estimated).low, (-estimated).high) == pytest.approx((-0.8, -0.2))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_that_are_all_alike_have_an_interval_with_a_width_inside_their_range(share: float):
    estimated = estimate(np.full(12, share), within=SHARE)
    assert 0.2 < estimated.high - estimated.low < 0.5
    assert (estimated.low if share == 0 else estimated.high) == share
    unchanged = estimate(np.zeros(12), within=DIFFERENCE)
    assert unchanged.low == -unchanged.high < -0.2
    assert percent(estimated).count(" to ") == 1


def test_leaving_the_only_cluster_with_a_denominator_out_gives_no_interval():
    bottom = np.zeros(10)
    bottom[3] = 1
    assert not ratio(np.ones(10), bottom).has_interval
    assert np.isnan(ratio(np.ones(10), np.zeros(10)).mean)


def test_samples_without_a_cluster_number_of_their_own_do_not_count_as_clusters():
    values = np.arange(20.0)
    assert estimate(values, np.repeat([3, 90], 10)).clusters == 2


def test_comparisons_widen_intervals_so_that_together_they_hold():
    rng = np.random.default_rng(3)
    single, together = 0, 0
    for _ in range(300):
        noise = rng.normal(size=(6, 12))
        clusters = np.arange(12)
        for comparisons in (1, 6):
            _, low, high = means(noise, clusters, comparisons=comparisons)
            claimed = bool(((low > 0) | (high < 0)).any())
            single, together = single + (claimed and comparisons == 1), together + (claimed and comparisons == 6)
    assert together <= 0.07 * 300 < 0.15 * 300 < single


@pytest.mark.parametrize(("draw", "truth"), [("normal", 0.0), ("lognormal", np.exp(0.5)), ("exponential", 1.0)])
@pytest.mark.parametrize("clusters", [8, 16])
def test_intervals_cover_where_a_percentile_bootstrap_does_not(draw: str, truth: float, clusters: int):
    """Five samples to a cluster; the bootstrap that resamples clusters covers 67 to 90 % here."""
    rng = np.random.default_rng(1)
    values = np.repeat(getattr(rng, draw)(size=(1500, clusters)), 5, axis=1)
    _, low, high = means(values, np.repeat(np.arange(clusters), 5))
    assert 0.92 <= ((low <= truth) & (truth <= high)).mean() <= 0.99


@pytest.mark.parametrize("clusters", [8, 16])
def test_ratios_to_which_clusters_contribute_unequally_are_covered(clusters: int):
    """With one degree of freedom fewer than clusters, about 91 % would be."""
    rng = np.random.default_rng(1)
    held = []
    for _ in range(1500):
        bottom = rng.lognormal(sigma=1.5, size=clusters)
        held.append(not ratio(bottom * rng.normal(size=clusters), bottom).differs(0.0))
    assert 0.94 <= np.mean(held) <= 0.985


def test_clusters_of_one_weight_count_fully_and_those_of_none_do_not():
    rng = np.random.default_rng(1)
    values, replicates = rng.normal(size=10), rng.normal(size=10)
    plain = jackknife(values.mean(), replicates)
    assert jackknife(values.mean(), replicates, weights=np.full(10, 3.0)) == plain
    assert effective(np.array([[2.0] * 6 + [0.0] * 4, [1.0] + [0.0] * 9])) == pytest.approx([6.0, 1.0])
    lone = jackknife(values.mean(), replicates, weights=np.array([1.0] + [0.0] * 9))
    assert lone.low < plain.low
    assert plain.high < lone.high


def test_wilson_is_the_textbooks_interval_and_stays_inside():
    """Against Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        estimated = wilson(successes, trials)
        assert (estimated.low, estimated.high) == pytest.approx((low, high), abs=5e-5)
        # Of two that hold together each leaves out 2.5 %; both ends p solve (share − p)² = z² p (1 − p) / n.
        for end in (wilson(successes, trials, 2).low, wilson(successes, trials, 2).high):
            share = successes / trials
            assert (share - end) ** 2 == pytest.approx(2.241403**2 * end * (1 - end) / trials, rel=1e-5, abs=1e-12)
        mirrored = wilson(trials - successes, trials)
        assert (mirrored.low, mirrored.high) == pytest.approx((1 - estimated.high, 1 - estimated.low))
    refused(lambda: wilson(3, 2), "must lie in 0 to 2")


def test_a_share_of_few_trials_has_a_range_and_no_interval():
    for successes, ends in ((0, (0, 0)), (3, (0, 1)), (7, (1, 1))):
        estimated = wilson(successes, 7)
        assert estimated.ends == ends
        assert not estimated.has_interval
        assert not estimated.differs(0.5)
    assert wilson(3, 8).has_interval


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(Estimate(-1e-5, -2e-5, 0.2)), "0.0 % (0.0 to 20.0)"),
        (points(Estimate(1e-5, -0.1, 1e-5)), "0.0 points (-10.0 to 0.0)"),
        (signed(Estimate(-1e-9, -0.5, 0.5)), "0.000 (-0.500 to +0.500)"),
        (plain(Estimate(-0.001, -1.0, 1.0)), "0.00 (-1.00 to 1.00)"),
        (two_digits(Estimate(0.0, -2e-9, 3e10)), "0 (-2e-09 to 3e+10)"),
        (percent(Estimate(1.0, 1.0, 1.0, 12)), "100.0 % (no spread)"),
        (percent(Estimate(1.0, 0.9999, 1.0, 12)), "100.0 % (no spread)"),
    ],
)
def test_no_zero_has_a_sign_and_no_interval_has_equal_ends(written: str, expected: str):
    assert written == expected


def test_the_difference_of_two_shares_is_newcombes():
    # Newcombe 1998, Statistics in Medicine 17:873, table II, example (a), method 10: 56/70 − 48/80.
    difference = newcombe(wilson(56, 70), wilson(48, 80))
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
