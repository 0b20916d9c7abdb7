"""Points of learning curves with intervals, and the value that a curve tends to.

Two things are drawn: clusters of test conversations, and sets of training conversations. A point is a table of draws ×
clusters. Its variance is that of the clusters' means over clusters, plus that of the draws' means over draws. Of a
number of conversations for which there is one draw only, the second is that of the next smaller number: more data make
draws more alike. Where every number has one draw only, intervals are over test conversations alone.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import chdtri, stdtrit

from kvprobe.stats import FEWEST, UNBOUNDED, Estimate, means

Point = Float[np.ndarray, "draws clusters"]
SLOPES = np.linspace(0.1, 1.5, 29)
"""Exponents of the power laws that a curve may follow."""
ENDS = 241
"""How many values of the asymptote are tried."""
DOUBTED = 1e-4
"""A law from which points are further away than in so few of its samples is not the curve's."""


def of_draws(curve: Sequence[Point]) -> Float[np.ndarray, "points"]:
    """The part of each point's variance that its training conversations have, points in order of their number."""
    parts, last = [], 0.0
    for point in curve:
        if len(point) > 1:
            last = float(point.mean(1).var(ddof=1))
        parts.append(last / len(point))
    return np.array(parts)


def points(curve: Sequence[Point], within: tuple[float, float] = UNBOUNDED, comparisons: int = 1) -> list[Estimate]:
    """The mean of each point with its interval; only the range of clusters where there are fewer than `FEWEST`.

    Clusters that are all alike at an end of the range can be so by chance: see `kvprobe.stats.interval`.
    """
    estimates = []
    for point, drawn in zip(curve, of_draws(curve), strict=True):
        by_cluster, clusters = point.mean(0), point.shape[1]
        mean, low, high = float(by_cluster.mean()), np.nan, np.nan
        if clusters >= FEWEST:
            half = _quantile(clusters, comparisons) * (by_cluster.var(ddof=1) / clusters + drawn) ** 0.5
            ends = [mean - half, mean + half]
            if np.ptp(by_cluster) == 0:
                _, least, most = means(by_cluster, np.arange(clusters), within, comparisons)
                ends = [min(ends[0], least), max(ends[1], most)]
            low, high = np.clip(ends, *within).tolist()
        estimates.append(Estimate(mean, low, high, clusters, float(by_cluster.min()), float(by_cluster.max())))
    return estimates


def asymptote(counts: Sequence[int], curve: Sequence[Point], most: float, comparisons: int = 1) -> Estimate | None:
    """The limit a of a − b · n^−c (b at least 0, c in `SLOPES`) with its profile interval, at most `most`; None for
    fewer than four points or `FEWEST` clusters, or where no such law fits: what it tends to then says nothing.

    Points share their test clusters, so their errors are alike: a common part, the mean covariance between points, and
    a part of its own. A value belongs to the interval where the best law that tends to it fits nearly as well as the
    best of all. Where the curve still rises the interval reaches up to `most`: then the data do not say.
    """
    clusters = curve[0].shape[1]
    if len(curve) < 4 or clusters < FEWEST:
        return None
    by_cluster = np.stack([point.mean(0) for point in curve])
    mean, covariance = by_cluster.mean(1), np.cov(by_cluster) / clusters
    common = max(0.0, float(covariance[~np.eye(len(curve), dtype=bool)].mean()))
    own = np.maximum(covariance.diagonal() - common, 0) + of_draws(curve)
    # With few clusters the variance of one point by itself is a poor estimate: it is drawn half way to the others'.
    own = (own + own.mean()) / 2 + 1e-12
    weights = np.linalg.inv(np.diag(own) + common)
    ends = np.unique(np.concatenate([np.linspace(min(0.0, mean.min()), most, ENDS), mean]))
    misfit = np.full(len(ends), np.inf)
    for slope in SLOPES:
        shape = np.asarray(counts, float) ** -slope
        shape /= shape[0]
        away = ends[:, None] - mean  # what b · n^−c has to explain
        falls = np.maximum(0.0, away @ weights @ shape / (shape @ weights @ shape))
        left = away - falls[:, None] * shape
        misfit = np.minimum(misfit, np.einsum("ei,ij,ej->e", left, weights, left))
    if misfit.min() > chdtri(len(curve) - 3, DOUBTED):
        return None
    inside = np.flatnonzero(misfit <= misfit.min() + _quantile(clusters, comparisons) ** 2)
    # One step further out on either side: the true ends lie between two values that were tried.
    low, high = ends[max(0, inside[0] - 1)], ends[min(len(ends) - 1, inside[-1] + 1)]
    return Estimate(float(ends[misfit.argmin()]), float(low), float(high), clusters)


def _quantile(clusters: int, comparisons: int) -> float:
    return float(stdtrit(clusters - 1, 1 - 0.025 / comparisons))
