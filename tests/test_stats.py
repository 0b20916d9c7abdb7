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
    binomial,
    effective,
    estimate,
    interval,
    jackknife,
    leave_one_out,
    means,
    newcombe,
    pooled,
    ratio,
)
from kvprobe.wording import formatted, percent, plain, points, signed, two_digits
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
    assert "(range " in written
    record = json.loads(json.dumps(estimated.record(), allow_nan=False))
    assert record["low"] is None


def test_claims_and_intervals_agree():
    estimated = Estimate(0.5, 0.2, 0.8)
    assert (estimated.above(0.1), estimated.differs(0.1), estimated.above(0.2)) == (True, True, False)
    assert (estimated.below(0.9), estimated.below(0.8), estimated.differs(0.5)) == (True, False, False)
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


@pytest.mark.parametrize("clusters", [8, 12, 16, 48])
@pytest.mark.parametrize("comparisons", [4, 24])
def test_families_of_skewed_comparisons_hold_together(clusters: int, comparisons: int):
    """Of 24 lognormal ones, some would be claimed in 22, 16, 14 and 10 % without a share of hidden skewness."""
    rng = np.random.default_rng(1)
    shape = (2, 600, comparisons, clusters)
    for data in (
        np.exp(0.5**0.5 * (rng.normal(size=shape)[0] + rng.normal(size=(600, 1, clusters)))) - np.exp(0.5),
        rng.exponential(size=shape[1:]) - 1,
    ):
        _, low, high = means(data, np.arange(clusters), comparisons=comparisons)
        assert ((low > 0) | (high < 0)).any(-1).mean() <= 0.07


@pytest.mark.parametrize("clusters", [8, 16])
@pytest.mark.parametrize(("top", "below"), [(1, 1), (-1, 1), (1, -1), (-1, -1)])
def test_ratios_of_lognormals_are_covered(clusters: int, top: int, below: int):
    """Without the logarithm, about 90 % would be."""
    rng = np.random.default_rng(1)
    held = []
    for _ in range(800):
        bottom, factor = rng.lognormal(size=(2, clusters))
        held.append(not ratio(top * bottom * factor, below * bottom).differs(top * below * np.exp(0.5)))
    assert 0.93 <= np.mean(held) <= 0.99


@pytest.mark.parametrize("comparisons", [1, 24])
def test_a_ratio_of_which_one_cluster_is_most_reaches_no_farther_than_clusters_do(comparisons: int):
    """By the logarithm alone some would reach millions of times as far."""
    rng = np.random.default_rng(1)
    missed, reach = [], []
    for _ in range(600):
        bottom, factor = rng.lognormal(sigma=1.5, size=8), rng.lognormal(size=8)
        found = ratio(bottom * factor, bottom, comparisons=comparisons)
        missed.append(found.high < np.exp(0.5))
        reach.append(found.high / factor.max())
    assert np.mean(missed) <= (0.06 if comparisons == 1 else 0.005)
    assert max(reach) < (20 if comparisons == 1 else 300)


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


@pytest.mark.parametrize(("successes", "trials"), [(81, 263), (15, 148), (0, 20), (1, 29), (8, 8)])
@pytest.mark.parametrize("comparisons", [1, 2])
def test_the_interval_of_a_share_is_exact(successes: int, trials: int, comparisons: int):
    expected = reference.binomtest(successes, trials).proportion_ci(1 - 0.05 / comparisons, "exact")
    assert binomial(successes, trials, comparisons).ends == pytest.approx((expected.low, expected.high), abs=1e-9)
    refused(lambda: binomial(trials + 1, trials), f"must lie in 0 to {trials}")


@pytest.mark.parametrize("comparisons", [1, 24])
@pytest.mark.parametrize("trials", [8, 16, 100])
def test_every_share_is_held_in_95_percent_of_cases(trials: int, comparisons: int):
    """Wilson's interval holds 2 % of 8 in 85 %."""
    successes = np.arange(trials + 1)
    ends = np.array([binomial(int(count), trials, comparisons).ends for count in successes])
    for share in (0.001, 0.005, 0.02, 0.05, 0.1, 0.3, 0.5):
        held = (ends[:, 0] <= share) & (share <= ends[:, 1])
        assert reference.binom.pmf(successes, trials, share)[held].sum() >= 1 - 0.05 / comparisons - 1e-9


@pytest.mark.parametrize("clusters", [8, 12, 16])
@pytest.mark.parametrize("share", [0.1, 0.98])
def test_a_column_of_0_and_1_is_a_share_without_being_called_one(clusters: int, share: float):
    """Taken for normal data, 10 % were held in 56, 73 and 80 % of cases: all clusters alike were given no width."""
    rng = np.random.default_rng(2)
    held = [not estimate(rng.binomial(1, share, clusters)).differs(share) for _ in range(400)]
    assert np.mean(held) >= 0.93
    for all_alike in (np.zeros(clusters), np.ones(clusters)):
        assert estimate(all_alike) == estimate(all_alike, within=SHARE) == binomial(all_alike.sum(), clusters)
        repeated = estimate(np.repeat(all_alike, 3), np.repeat(np.arange(clusters), 3))
        _, low, high = means(all_alike[None], np.arange(clusters))
        (kind,) = [(all_alike, np.arange(clusters))]
        for written in (repeated, Estimate(0, low[0], high[0]), pooled([kind])):
            assert written.ends == pytest.approx(binomial(all_alike.sum(), clusters).ends)
    unchanged = pooled([(np.ones(clusters), np.arange(clusters))] * 2)
    assert unchanged.low == pytest.approx(-unchanged.high)
    assert unchanged.high > 0.2


@pytest.mark.parametrize("unit", [1.0, 0.3, -100.0])
@pytest.mark.parametrize(("clusters", "chance"), [(8, 0.1), (16, 0.1), (48, 0.05)])
def test_a_difference_that_has_one_sign_by_chance_is_no_claim(clusters: int, chance: float, unit: float):
    rng = np.random.default_rng([3, clusters])
    drawn = (rng.random((2, 1000, clusters)) < chance).astype(float)
    assert np.mean([estimate(unit * difference).differs() for difference in drawn[0] - drawn[1]]) < 0.065


def test_two_values_are_a_share_in_any_unit_and_one_value_has_no_interval():
    right = (np.arange(12) < 9).astype(float)
    percent, share = estimate(100 * right), binomial(9, 12)
    assert percent.ends == pytest.approx([100 * end for end in share.ends])
    assert (percent.mean, percent.smallest, percent.largest) == (75.0, 0.0, 100.0)
    assert not estimate(np.full(12, 100.0)).has_interval
    assert estimate(right, within=(-np.inf, np.inf)).ends != share.ends


@pytest.mark.parametrize("clusters", [(8, 8), (8, 144), (16, 144)])
def test_shares_of_two_kinds_without_common_clusters_are_compared_by_their_own_intervals(clusters: tuple[int, int]):
    rng = np.random.default_rng([4, *clusters])
    members = np.split(np.arange(sum(clusters)), [clusters[0]])
    claims = [
        pooled([((rng.random(len(own)) < 0.1).astype(float), own) for own in members]).differs() for _ in range(500)
    ]
    assert np.mean(claims) <= 0.05


def test_a_share_of_few_trials_has_a_range_and_no_interval():
    for successes, ends in ((0, (0, 0)), (3, (0, 1)), (7, (1, 1))):
        estimated = binomial(successes, 7)
        assert estimated.ends == ends
        assert not estimated.has_interval
        assert not estimated.differs(0.5)
    assert binomial(3, 8).has_interval


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(Estimate(-1e-5, -2e-5, 0.2)), "0.0 % (0.0 to 20.0)"),
        (points(Estimate(1e-5, -0.1, 1e-5)), "0.0 points (-10.0 to 0.0)"),
        (signed(Estimate(-1e-9, -0.5, 0.5)), "0.000 (-0.500 to +0.500)"),
        (plain(Estimate(-0.001, -1.0, 1.0)), "0.00 (-1.00 to 1.00)"),
        (two_digits(Estimate(0.0, -2e-9, 3e10)), "0 (-2e-09 to 3e+10)"),
        (percent(Estimate(1.0, 1.0, 1.0, 12)), "100.0 % (no spread)"),
        (percent(Estimate(1.0, 0.9999, 1.0, 12)), "100.00 % (99.99 to 100.00)"),
        (signed(Estimate(0.00046, 0.0002, 0.0008)), "+0.0005 (+0.0002 to +0.0008)"),
        (formatted("+.2f")(Estimate(0.00046, 0.0002, 0.0008)), "+0.0005 (+0.0002 to +0.0008)"),
        (two_digits(Estimate(1.0, 0.9999, 1.0001)), "1 (0.9999 to 1)"),
    ],
)
def test_no_zero_has_a_sign_and_no_interval_has_equal_ends(written: str, expected: str):
    assert written == expected


def test_the_difference_of_two_shares_is_newcombes():
    one, other = binomial(56, 70), binomial(48, 80)
    difference = newcombe(one, other)
    below = np.hypot(one.mean - one.low, other.high - other.mean)
    above = np.hypot(one.high - one.mean, other.mean - other.low)
    assert (difference.mean, difference.low, difference.high) == pytest.approx((0.2, 0.2 - below, 0.2 + above))
    # Newcombe 1998, Statistics in Medicine 17:873, table II, example (a), method 11, whose shares are corrected, too.
    assert (difference.low, difference.high) == pytest.approx((0.0428, 0.3422), abs=0.002)
