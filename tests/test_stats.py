"""Cluster bootstrap: right by a slow loop, and wider than pretending that samples are independent."""

import numpy as np
import pytest

from kvprobe.stats import cluster_bootstrap, cluster_weights, estimate, wilson


def test_the_bootstrap_equals_a_slow_loop_over_resampled_clusters():
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(5), [3, 1, 4, 2, 5])
    values = rng.random((2, len(clusters)))
    weights = cluster_weights(5, rng, resamples=50)
    mean, low, high = cluster_bootstrap(values, clusters, weights)
    for quantity in range(2):
        resampled = []
        for draw in weights:
            members = np.concatenate([np.repeat(values[quantity, clusters == c], draw[c]) for c in range(5)])
            resampled.append(members.mean())
        np.testing.assert_allclose([low[quantity], high[quantity]], np.percentile(resampled, [2.5, 97.5]))
    np.testing.assert_allclose(mean, values.mean(1))


def test_weights_draw_as_many_clusters_as_there_are_and_depend_on_the_seed_alone():
    weights = cluster_weights(7, np.random.default_rng(3), resamples=20)
    assert (weights.sum(1) == 7).all()
    np.testing.assert_array_equal(weights, cluster_weights(7, np.random.default_rng(3), resamples=20))
    assert (weights != cluster_weights(7, np.random.default_rng(4), resamples=20)).any()


def test_the_interval_covers_the_truth_where_a_naive_one_does_not():
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(30), 20)
    covered, naive_covered = 0, 0
    for _ in range(100):
        values = np.repeat(rng.normal(size=30), 20) + 0.1 * rng.normal(size=600)
        interval = estimate(values, clusters, cluster_weights(30, rng, resamples=400))
        naive = 1.96 * values.std() / np.sqrt(len(values))
        covered += interval.low <= 0 <= interval.high
        naive_covered += abs(values.mean()) <= naive
    assert covered >= 85
    assert naive_covered <= 60


def test_wilson_is_the_textbooks_interval_and_stays_inside():
    """Against Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(successes, trials)
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)
        mirrored = wilson(trials - successes, trials)
        assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))
    with pytest.raises(ValueError, match="are no share"):
        wilson(3, 2)
