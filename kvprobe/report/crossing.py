"""Where along a scale, such as the budgets of a policy or the rates of a fault, an estimate crosses a limit."""

from collections.abc import Sequence
from math import nan

import numpy as np
from jaxtyping import Float

from kvprobe.report.findings import Finding
from kvprobe.stats import Estimate


def least_within(
    scale: Sequence[float], losses: Sequence[Estimate], tolerance: float, *, between: bool = True
) -> Estimate:
    """The least value of a falling scale down to which every level measured loses at most `tolerance`; unknown where
    none does.

    A crossing is followed by no jackknife: its interval is between where the ends of the losses' intervals cross, an
    end that is never reached being unknown. Where the losses have no interval there are no clusters.

    Args:
        between: whether there is something between two levels; see `crossings`.
    """
    ends = np.array([[getattr(loss, end) for loss in losses] for end in ("mean", "low", "high")])
    across = crossings(np.array(scale), ends, tolerance, between)
    clusters = 0 if np.isnan(across).any() else min(loss.clusters for loss in losses)
    mean, low, high = (float(end) if np.isfinite(end) else nan for end in across)
    return Estimate(mean, low, high, clusters)


def crossings(
    scale: Float[np.ndarray, "levels"], losses: Float[np.ndarray, "draws levels"], tolerance: float, between: bool
) -> Float[np.ndarray, "draws"]:
    """The least value of a falling scale down to which every level measured loses at most `tolerance`; infinite if the
    first loses more, NaN for losses that are not known.

    Args:
        between: whether there is something between two levels, so that the line from the last level that is near
            enough to the next one says where it is crossed. Below the last level measured nothing is assumed.
    """
    near = np.cumprod(losses <= tolerance, axis=1).sum(1)
    last = np.clip(near - 1, 0, None)
    after = np.clip(near, None, len(scale) - 1)
    rows = np.arange(len(losses))
    inside, outside = losses[rows, last], losses[rows, after]
    crosses = (near > 0) & (near < len(scale)) & between
    way = np.where(crosses, (tolerance - inside) / np.where(crosses, outside - inside, 1.0), 0.0)
    least = np.where(near > 0, scale[last] + way * (scale[after] - scale[last]), np.inf)
    return np.where(np.isnan(losses).any(1), np.nan, least)


def until_below(findings: Sequence[Finding], along: str) -> tuple[float | None, float | None]:
    """The highest value of a key up to which no number is significantly below zero, and the lowest at which one is;
    None for one that was not measured."""
    values: list[float | None] = [float(finding.keys[along]) for finding in findings]
    below = [finding.value.below() for finding in findings]
    first = below.index(True) if True in below else len(below)
    return ([None, *values][first], [*values, None][first])
