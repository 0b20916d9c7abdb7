"""Intervals from leaving out one cluster (a context) at a time, because samples of one context are not independent.

The delete-one-cluster jackknife needs only a statistic's value without each cluster, so it serves means, differences,
ratios, slopes and refitted probes. The quantile is Student's t, with degrees of freedom from the effective number of
clusters, and the end on the side of a long tail is moved out. Shares of independent trials have exact intervals.
Fewer than `FEWEST` clusters give a range and no interval. docs/results/coverage.md reports the measured coverage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, isnan, nan
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Num, Shaped
from scipy.special import bdtr, betaincinv, stdtrit

from kvprobe.errors import UserError

FEWEST = 8
"""Clusters below which there is no interval, only the range of the clusters' values."""
SHARE = (0.0, 1.0)
"""The natural range of a share."""
DIFFERENCE = (-1.0, 1.0)
"""The natural range of a difference between shares, and of a correlation."""
POSITIVE = (0.0, np.inf)
"""The natural range of a divergence."""
UNBOUNDED = (-np.inf, np.inf)
_ENDS = ("low", "high", "smallest", "largest")


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, or with a range where there are too few clusters for an interval.

    Attributes:
        low, high: ends of the interval; NaN without one.
        clusters: number of independent clusters; 0 where that is not known.
        smallest, largest: range of the clusters' values; NaN where it is not known.
    """

    mean: float
    low: float = nan
    high: float = nan
    clusters: int = 0
    smallest: float = nan
    largest: float = nan

    @property
    def unknown(self) -> bool:
        """Whether there is no number, such as a rate at which nothing happened."""
        return isnan(self.mean)

    @property
    def has_interval(self) -> bool:
        return not (isnan(self.low) or isnan(self.high))

    @property
    def ends(self) -> tuple[float, float]:
        """Ends of the error bar of the number: the interval, or the range where there is none."""
        return (self.low, self.high) if self.has_interval else (self.smallest, self.largest)

    def above(self, value: float = 0.0) -> bool:
        """Whether the whole interval lies above a value; never without an interval."""
        return bool(self.low > value)

    def below(self, value: float = 0.0) -> bool:
        """Whether the whole interval lies below a value; never without an interval."""
        return bool(self.high < value)

    def differs(self, value: float = 0.0) -> bool:
        """Whether the whole interval lies on one side of a value; never without an interval."""
        return self.above(value) or self.below(value)

    def __neg__(self) -> "Estimate":
        return Estimate(-self.mean, -self.high, -self.low, self.clusters, -self.largest, -self.smallest)

    @property
    def exponential(self) -> "Estimate":
        """The number of which this is the logarithm."""
        ends = {end: float(np.exp(getattr(self, end))) for end in ("mean", *_ENDS)}
        return replace(self, **ends)

    def columns(self, name: str) -> dict[str, float]:
        """As columns of a table, `name`, `name_low` and so on, from which `of_columns` makes it again."""
        return {name: self.mean} | {f"{name}_{end}": getattr(self, end) for end in _ENDS}

    @classmethod
    def of_columns(cls, row: Any, name: str, clusters: int) -> "Estimate":
        ends = {end: float(row[f"{name}_{end}"]) for end in _ENDS}
        return cls(float(row[name]), clusters=clusters, **ends)

    def record(self) -> dict[str, float | None]:
        """The fields for strict JSON: NaN and infinity become None."""
        return {name: value if isfinite(value) else None for name, value in vars(self).items()}

    def __str__(self) -> str:
        if self.has_interval:
            return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return f"{self.mean:.3f} (range {self.smallest:.3f} to {self.largest:.3f} over {self.clusters})"


def leave_one_out(clusters: int) -> Int[np.ndarray, "clusters clusters"]:
    """Weights whose row g takes all clusters but g: `weights @ sums / weights @ sizes` are the replicates of a mean."""
    return 1 - np.eye(clusters, dtype=int)


def interval(
    estimate: Num[np.ndarray, "*quantities"] | float,
    replicates: Num[np.ndarray, "*quantities clusters"],
    within: tuple[float, float] = UNBOUNDED,
    comparisons: int = 1,
    weights: Num[np.ndarray, "*#quantities clusters"] | None = None,
) -> tuple[Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"]]:
    """The 95 % interval of each quantity, from its value without each cluster; NaN with fewer than `FEWEST` clusters.

    The jackknife's pseudo-values take the place of independent observations: half the width is their standard error
    times Student's t, with one degree of freedom fewer than (effective) clusters. The end on the side of the longer
    tail is moved out by Johnson's correction for skewness (1978). The correction is enlarged, because few clusters hide
    most of their skewness, less so in a limited range; of many comparisons the most extreme one hides the most, but not
    of differences between single answers, which are -1, 0 or 1 and have no tail to hide. Clusters that are all alike at
    -1, 0 or 1 can be so by chance: in a limited range the interval reaches as far as clusters at its ends could move
    the mean that all were missed with a probability of 2.5 %.
    docs/results/coverage.md reports the coverage.

    Args:
        within: the natural range of the quantities, `SHARE` or `DIFFERENCE`, which limits the intervals.
        comparisons: number of intervals among which a claim is chosen; all of them together exclude the truth in at
            most 5 % of cases (Bonferroni).
        weights: how much each cluster counts, all alike by default. Of clusters that count differently, fewer decide:
            the degrees of freedom are those of the `effective` number.
    """
    estimate, pseudo = np.asarray(estimate, float), pseudo_values(estimate, replicates)
    count = pseudo.shape[-1]
    if count < FEWEST:
        missing = np.full(estimate.shape, nan)
        return missing, missing.copy()
    equal = count if weights is None else effective(weights)
    quantile, quantile_of_all = (stdtrit(np.maximum(1.0, many - 1), 1 - 0.025 / comparisons) for many in (equal, count))
    deviations = pseudo - pseudo.mean(-1, keepdims=True)
    variance = (deviations**2).mean(-1) * count / (count - 1)
    alike = variance <= (1e-12 * np.maximum(1.0, np.abs(estimate))) ** 2
    spread = np.sqrt(np.where(alike, 1.0, variance))
    skewness = (deviations**3).mean(-1) * count**2 / ((count - 1) * (count - 2)) / spread**3
    limited = np.isfinite(within).all()
    answers = limited & (np.abs(pseudo - np.round(pseudo)) < 1e-9).all(-1)
    enlarged, hidden = np.where(limited, 1.5, 1 + 40 / count), np.where(answers, 0.0, np.log(comparisons) / 3)
    scale = enlarged * (1 / 6 + quantile_of_all**2 / 3) / np.sqrt(count)
    missed = 1 - (0.025 / comparisons) ** (1 / count)
    ends = []
    for side, end in zip((-1, 1), within, strict=True):
        shift = quantile + scale * np.maximum(0, side * skewness + hidden)
        unseen = missed * (end - estimate) if limited else 0.0
        by_chance = np.where(np.isin(estimate, (-1.0, 0.0, 1.0)), unseen, 0.0)
        moved = estimate + np.where(alike, by_chance, side * shift * spread / np.sqrt(count))
        ends.append(np.asarray(np.clip(moved, *within)))
    return ends[0], ends[1]


def natural(within: tuple[float, float] | None, *columns: Num[np.ndarray, "..."]) -> tuple[float, float]:
    """The natural range as given; without one, that of a column of 0 and 1, or of -1, 0 and 1, is that of a share, or
    of a difference of shares, as is that of two columns of 0 and 1. Others are unlimited."""
    if within is not None:
        return within
    if not all(np.isin(column, (-1, 0, 1)).all() for column in columns):
        return UNBOUNDED
    return SHARE if len(columns) == 1 and (columns[0] >= 0).all() else DIFFERENCE


def effective(weights: Num[np.ndarray, "*quantities clusters"]) -> Float[np.ndarray, "*quantities"]:
    """The number of clusters of one weight whose mean would be known as well as this weighted mean (Kish 1965)."""
    weights = np.asarray(weights, float)
    return np.asarray(weights.sum(-1) ** 2 / (weights**2).sum(-1))


def pseudo_values(
    estimate: Num[np.ndarray, "*quantities"] | float, replicates: Num[np.ndarray, "*quantities clusters"]
) -> Float[np.ndarray, "*quantities clusters"]:
    """Each cluster's contribution (Tukey's pseudo-values); the clusters' means, for a mean of clusters of one size."""
    count = replicates.shape[-1]
    return count * np.asarray(estimate, float)[..., None] - (count - 1) * np.asarray(replicates, float)


def jackknife(
    estimate: float,
    replicates: Num[np.ndarray, "clusters"],
    within: tuple[float, float] = UNBOUNDED,
    comparisons: int = 1,
    weights: Num[np.ndarray, "clusters"] | None = None,
) -> Estimate:
    """One quantity with its interval and the range of the clusters' contributions; see `interval`."""
    low, high = interval(estimate, replicates, within, comparisons, weights)
    pseudo = np.clip(pseudo_values(estimate, replicates), *within)
    ends = (float(pseudo.min()), float(pseudo.max())) if len(pseudo) > 1 else (float(estimate), float(estimate))
    return Estimate(float(estimate), float(low), float(high), len(pseudo), *ends)


def ratio(
    top: Num[np.ndarray, "clusters"],
    bottom: Num[np.ndarray, "clusters"],
    within: tuple[float, float] = UNBOUNDED,
    comparisons: int = 1,
) -> Estimate:
    """The sum of one quantity over clusters divided by the sum of another; NaN where the latter is zero.

    Where each has one sign in all clusters, the end farther from zero is also that of the logarithm, if this is
    farther: the tail of such a ratio is longer than its clusters show. Where one cluster is most of a sum, it would be
    beyond anything seen; so it goes no farther than the largest ratio of a cluster, whose distance in logarithms grows
    by the number of comparisons as Student's t does.
    """
    top, bottom = np.asarray(top, float), np.asarray(bottom, float)
    if (bottom < 0).all():
        return ratio(-top, -bottom, within, comparisons)
    if (top < 0).all() and (bottom > 0).all():
        return -ratio(-top, bottom, (-within[1], -within[0]), comparisons)
    linear = _quotient(top, bottom, within, comparisons)
    if not (linear.has_interval and top.min() > 0 and bottom.min() > 0):
        return linear
    without = np.log((top.sum() - top) / (bottom.sum() - bottom))
    _, high = interval(np.log(linear.mean), without, comparisons=comparisons, weights=bottom)
    several, one = (stdtrit(len(top) - 1, 1 - 0.025 / many) for many in (comparisons, 1))
    seen = np.log(linear.mean) + several / one * np.log((top / bottom).max() / linear.mean)
    return replace(linear, high=min(max(linear.high, float(np.exp(min(high, seen)))), within[1]))


def estimate(
    values: Num[np.ndarray, "samples"],
    clusters: Int[np.ndarray, "samples"] | None = None,
    within: tuple[float, float] | None = None,
    comparisons: int = 1,
) -> Estimate:
    """The mean over samples with its interval over clusters; each sample is its own cluster by default.

    The interval of a share with one sample a cluster, each 0 or 1, is exact, and so is that of other values of which
    there are only two. Zeros and one other value that nobody called a share may be a difference that has one sign by
    chance, so its interval reaches to 0 where a difference's does. Other values that are all alike have no interval.
    """
    values = np.asarray(values, float)
    _, members = np.unique(np.arange(len(values)) if clusters is None else clusters, return_inverse=True)
    sizes, levels, limits = np.bincount(members), np.unique(values), natural(within, values)
    whole = _quotient(np.bincount(members, values), sizes, limits, comparisons)
    if within is None and limits == UNBOUNDED and levels[-1] - levels[0] <= 1e-12 * max(1.0, abs(levels[-1])):
        return replace(whole, low=nan, high=nan)
    least, most = (0.0, 1.0) if limits == SHARE or len(levels) == 0 else (levels[0], levels[-1])
    two = np.isin(values, (least, most)).all() and limits in (SHARE, UNBOUNDED) and within != UNBOUNDED
    if not two or sizes.max(initial=0) != 1:
        return whole
    share, span = binomial(float((values == most).sum()), len(values), comparisons), most - least
    exact = replace(share, **{end: float(least + span * getattr(share, end)) for end in ("mean", *_ENDS)})
    if within is None and 0 in (least, most) and not _quotient(values / span, sizes, DIFFERENCE, comparisons).differs():
        return replace(exact, low=min(exact.low, 0.0), high=max(exact.high, 0.0))
    return exact


def _quotient(
    top: Num[np.ndarray, "clusters"], bottom: Num[np.ndarray, "clusters"], within: tuple[float, float], comparisons: int
) -> Estimate:
    with np.errstate(divide="ignore", invalid="ignore"):
        whole, without = top.sum() / bottom.sum(), (top.sum() - top) / (bottom.sum() - bottom)
    if not isfinite(whole):
        return Estimate(nan, clusters=len(top))
    return jackknife(float(whole), np.where(np.isfinite(without), without, nan), within, comparisons, bottom)


def pooled(
    kinds: Sequence[tuple[Num[np.ndarray, "_"], Shaped[np.ndarray, "_"]]],
    within: tuple[float, float] | None = None,
    comparisons: int = 1,
) -> Estimate:
    """The mean over samples, all counted alike; or, of two kinds of samples, that of the first less that of the second.

    There is no interval where a kind has fewer than `FEWEST` clusters. Of shares whose kinds have no cluster in common,
    it is made of each kind's own (see `newcombe`): a kind whose few clusters are all alike hides how much it varies.

    Args:
        kinds: the values of each kind, and the cluster of each value. A cluster may have samples of one kind.
    """
    clusters = np.unique(np.concatenate([members for _, members in kinds]))
    within = natural(within, *(values for values, _ in kinds))
    if within == DIFFERENCE and len(clusters) == sum(len(np.unique(members)) for _, members in kinds):
        limits = (SHARE if (values >= 0).all() else DIFFERENCE for values, _ in kinds)
        own = [estimate(*kind, limit, comparisons) for kind, limit in zip(kinds, limits, strict=True)]
        return newcombe(own[0], own[1]) if len(own) == 2 else own[0]
    mean, without, weights = 0.0, np.zeros(len(clusters)), np.zeros(len(clusters))
    for sign, (values, members) in zip((1, -1), kinds, strict=False):
        places = np.searchsorted(clusters, members)
        sizes, sums = np.bincount(places, minlength=len(clusters)), np.bincount(places, values, len(clusters))
        mean += sign * sums.sum() / sizes.sum()
        without += sign * (sums.sum() - sums) / (sizes.sum() - sizes)
        weights += sizes / sizes.sum()
    whole = jackknife(float(mean), without, within, comparisons, weights)
    least = min(len(np.unique(members)) for _, members in kinds)
    return whole if least >= FEWEST else replace(whole, low=nan, high=nan, clusters=least)


def means(
    values: Num[np.ndarray, "*quantities samples"],
    clusters: Int[np.ndarray, "samples"],
    within: tuple[float, float] | None = None,
    comparisons: int = 1,
) -> tuple[Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"]]:
    """Mean over samples of many quantities, with the ends of their intervals; see `interval`."""
    _, members = np.unique(clusters, return_inverse=True)
    sizes = np.bincount(members)
    summed = np.zeros((len(sizes), *values.shape[:-1]))
    np.add.at(summed, members, np.moveaxis(values, -1, 0))
    sums = np.moveaxis(summed, 0, -1)
    mean = np.asarray(values.mean(-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        without = (sums.sum(-1, keepdims=True) - sums) / (sizes.sum() - sizes)
    return mean, *interval(mean, without, natural(within, values), comparisons, sizes)


def statistic(
    values: Sequence[Float[np.ndarray, "*axes items"]],
    say: Callable[..., Float[np.ndarray, "draws"]],
    within: tuple[float, float],
    comparisons: int = 1,
) -> Estimate | None:
    """What `say` makes of means over items, with its interval; None where it cannot be computed.

    Args:
        values: quantities, items last; only items at which all are known count, and they must be at least half.
        say: from means, draws first (all items, then all but each), to a number for each draw.
    """
    known = np.logical_and.reduce([np.isfinite(quantity).reshape(-1, quantity.shape[-1]).all(0) for quantity in values])
    count = int(known.sum())
    if 2 * count < len(known):
        return None
    weights = np.concatenate([np.ones((1, count), int), leave_one_out(count)])
    sizes = np.maximum(weights.sum(1), 1)
    means = [np.moveaxis(np.moveaxis(quantity[..., known], -1, 0).T @ weights.T / sizes, -1, 0) for quantity in values]
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = say(*means)
    if not np.isfinite(numbers[0]):
        return None
    # An item counts as much as it contributes to the means.
    parts = [np.abs(quantity[..., known]).reshape(-1, count).sum(0) for quantity in values]
    shares = np.sum([part / part.sum() for part in parts if part.sum()], axis=0)
    return jackknife(float(numbers[0]), numbers[1:], within, comparisons, shares)


def conformal_rank(scores: int, rate: float) -> int:
    """Which of so many sorted scores, counted from 1, a new one of the same kind exceeds with a probability of at most
    `rate`; more than there are where so few cannot bound it (split conformal prediction; Vovk et al. 2005)."""
    return ceil((scores + 1) * (1 - rate))


def ranks_of_quantile(scores: int, rate: float) -> tuple[int, int]:
    """The 95 % interval of how many of so many scores lie beyond the value that a share of `rate` exceeds: the value
    lies between two of the sorted scores, of which so many are larger."""
    below = bdtr(np.arange(scores + 1), scores, rate)
    return int(np.searchsorted(below, 0.025)), int(np.searchsorted(below, 0.975))


def binomial(successes: int | float, trials: int, comparisons: int = 1) -> Estimate:
    """A share of independent trials with its exact 95 % interval (Clopper and Pearson 1934); a range below `FEWEST`.

    Wilson's interval is shorter, but holds a share of 2 % in 85 % of cases with 8 trials.

    Args:
        comparisons: number of intervals that are to hold together (Bonferroni).
        successes: also a mean over repetitions times the number of independent trials; the interval is then
            conservative.

    Raises:
        UserError: `successes` is outside 0 to `trials`, or there is no trial.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise UserError(f"Successes must lie in 0 to {trials}, the number of trials; got {successes} of {trials}.")
    failures, level = trials - successes, 0.025 / comparisons
    share = Estimate(successes / trials, nan, nan, trials, float(not failures), float(successes > 0))
    if trials < FEWEST:
        return share
    low = float(betaincinv(successes, failures + 1, level)) if successes else 0.0
    high = float(betaincinv(successes + 1, failures, 1 - level)) if failures else 1.0
    return replace(share, low=low, high=high)


def newcombe(one: Estimate, other: Estimate) -> Estimate:
    """The difference of two independent shares, from the interval of each (the method of Newcombe 1998)."""
    difference = one.mean - other.mean
    below = ((one.mean - one.low) ** 2 + (other.high - other.mean) ** 2) ** 0.5
    above = ((one.high - one.mean) ** 2 + (other.mean - other.low) ** 2) ** 0.5
    smallest, largest = one.ends[0] - other.ends[1], one.ends[1] - other.ends[0]
    trials = min(one.clusters, other.clusters)
    return Estimate(difference, difference - below, difference + above, trials, smallest, largest)
