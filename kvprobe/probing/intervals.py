"""Intervals of what cross-validated probes read: the jackknife over contexts, widened because contexts train each
other's probes.

Out of fold, the result for one context depends on all the others, which trained its probe. With the fits held fixed,
contexts look more independent than they are. Where there is nothing to read, the accuracy is a sum over pairs of
contexts, of which each context sees half: its variance is then up to twice that of independent contexts. Where training
has nothing more to learn, it is that of independent contexts. `SHARED` lies between, as the correction of Nadeau and
Bengio (2003) does for random splits. Leaving each context out and fitting again costs more and gives intervals that are
too wide (99.5 % and more), because a hit is not a smooth function of the training set. docs/results/coverage.md has the
measured coverage.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from kvprobe import stats
from kvprobe.stats import UNBOUNDED, Estimate

INFORMATION = (0.0, np.inf)
"""The natural range of information in bits: a reader that ignores the features loses nothing."""

LEVEL = 0.05
"""Family-wise level of p-values and claims."""

SHARED = 1.75
"""How much larger the variance is than that of contexts which do not train each other's probes."""


def held_out_means(
    values: Float[np.ndarray, "*quantities samples"],
    clusters: Int[np.ndarray, "samples"],
    within: tuple[float, float] = UNBOUNDED,
    comparisons: int = 1,
) -> tuple[Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"]]:
    """Mean over samples of many out-of-fold quantities, with the ends of their intervals; see `kvprobe.stats.means`.

    A mean outside the natural range, as information below zero, counts as the end of the range.
    """
    raw = values.mean(-1, keepdims=True)
    mean = raw.clip(*within)
    _, low, high = stats.means(mean + SHARED**0.5 * (values - raw), clusters, within, comparisons)
    return mean[..., 0], low, high


def held_out(
    values: Float[np.ndarray, "samples"],
    clusters: Int[np.ndarray, "samples"],
    within: tuple[float, float] = UNBOUNDED,
    comparisons: int = 1,
) -> Estimate:
    """One such mean with its interval, and with the range of the clusters' own means."""
    mean, low, high = (float(number) for number in held_out_means(values, clusters, within, comparisons))
    return replace(stats.estimate(values, clusters, within), mean=mean, low=low, high=high)
