"""Intervals: bootstraps that resample whole clusters (contexts), because samples of one context are not independent."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def cluster_weights(
    clusters: int, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Int[np.ndarray, "resamples clusters"]:
    """How often each cluster is drawn in each resample. Use the same weights for quantities to be compared."""
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples)


def cluster_bootstrap(
    values: Float[np.ndarray, "*quantities samples"],
    clusters: Int[np.ndarray, "samples"],
    weights: Int[np.ndarray, "resamples clusters"],
) -> tuple[Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"], Float[np.ndarray, "*quantities"]]:
    """Mean over samples of each quantity, with the 2.5 and 97.5 percentiles over resampled clusters.

    Args:
        clusters: which cluster each sample belongs to, numbered from 0.
        weights: see `cluster_weights`.
    """
    count = weights.shape[1]
    summed = np.zeros((count, *values.shape[:-1]))
    np.add.at(summed, clusters, np.moveaxis(values, -1, 0))
    sums = np.moveaxis(summed, 0, -1)
    sizes = np.bincount(clusters, minlength=count)
    resampled = (sums @ weights.T) / (sizes @ weights.T)
    low, high = np.percentile(resampled, [2.5, 97.5], axis=-1)
    return np.asarray(values.mean(-1)), np.asarray(low), np.asarray(high)


def estimate(
    values: Float[np.ndarray, "samples"],
    clusters: Int[np.ndarray, "samples"],
    weights: Int[np.ndarray, "resamples clusters"],
) -> Estimate:
    """`cluster_bootstrap` of one quantity."""
    return Estimate(*(float(number) for number in cluster_bootstrap(values, clusters, weights)))


def wilson(successes: int | float, trials: int) -> Estimate:
    """A share with its 95 % Wilson interval, which stays inside 0 to 1 and is honest for few trials.

    Args:
        successes: may be a mean over repetitions times the number of independent trials; the interval is then wide enough.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(
            f"{successes} successes of {trials} trials are no share; give 0 to as many as there are trials."
        )
    z, share = 1.959963984540054, successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * (share * (1 - share) / trials + z * z / (4 * trials**2)) ** 0.5
    # Rounding can leave the ends a hair beyond the share itself, at 0 and 1.
    return Estimate(share, max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))
