"""One task's rows as arrays, and estimates of what they have on average.

Each item gives one row of every case, from shared draws, so all comparisons are paired and items are the clusters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvprobe.stats import UNBOUNDED, estimate, jackknife, leave_one_out

Range = tuple[float, float]
LABELS = ["group", "band", "first", "last", "noise", "parts", "rate"]


@dataclass(frozen=True)
class Measured:
    """One task's rows as arrays; items are in the table's order.

    Attributes:
        cases: what tells each case apart.
        kl: in nats; missing where the row broke, or was not measured.
        right: whether the answer is right, which a broken row's never is.
        same: whether the whole answer is the clean one.
        clean: whether the clean answer is right.
    """

    cases: Sequence[Mapping[str, Any]]
    kl: Float[np.ndarray, "cases items"]
    right: Float[np.ndarray, "cases items"]
    same: Float[np.ndarray, "cases items"]
    broken: Bool[np.ndarray, "cases items"]
    clean: Float[np.ndarray, "items"]

    @classmethod
    def of(cls, rows: Any) -> "Measured":
        """The rows of one task, as `trials.collect` gives them."""
        struck = rows[rows["case"] >= 0]
        cases = struck.drop_duplicates("case").sort_values("case")[LABELS].to_dict("records")

        def array(values: Any) -> np.ndarray:
            return struck.assign(shown=values).pivot(index="case", columns="sample", values="shown").to_numpy()

        broken = struck["broken"] != ""
        clean = rows[rows["case"] < 0].sort_values("sample")["right"].to_numpy(dtype=float)
        return cls(
            cases,
            array(struck["kl"].astype(float).mask(broken)),
            array((struck["right"] & ~broken).astype(float)),
            array(struck["same"].astype(float)),
            array(broken).astype(bool),
            clean,
        )

    @property
    def items(self) -> int:
        return len(self.clean)

    @property
    def lost(self) -> Float[np.ndarray, "cases items"]:
        """What each case loses of the clean answer's score."""
        return self.clean - self.right

    def pick(self, values: Float[np.ndarray, "cases items"], **labels: Any) -> Float[np.ndarray, "items"]:
        """A measure under the cases with these labels, their mean item by item (missing where one is missing)."""
        wanted = {name: value for name, value in labels.items() if value is not None}
        found = [place for place, case in enumerate(self.cases) if wanted.items() <= case.items()]
        return values[found].mean(0)


def mean_of(
    values: Float[np.ndarray, "items"], within: Range = UNBOUNDED, comparisons: int = 1
) -> dict[str, Any] | None:
    """The mean of one quantity over items for which it is known; None where those are fewer than half."""
    found = np.isfinite(values)
    if 2 * found.sum() < len(found):
        return None
    return estimate(values[found], within=within, comparisons=comparisons).record()


def statistic(
    values: Sequence[Float[np.ndarray, "*axes items"]], say: Callable[..., Float[np.ndarray, "draws"]], within: Range
) -> dict[str, Any] | None:
    """What `say` makes of means over items, with its interval; None where it cannot be said.

    Args:
        values: quantities, items last; only items at which all are known count.
        say: from means, draws first (all items, then all but each), to a number for each draw.
    """
    found = np.logical_and.reduce([np.isfinite(each).reshape(-1, each.shape[-1]).all(0) for each in values])
    count = int(found.sum())
    if 2 * count < len(found):
        return None
    weights = np.concatenate([np.ones((1, count), int), leave_one_out(count)])
    sizes = np.maximum(weights.sum(1), 1)
    means = [np.moveaxis(np.moveaxis(each[..., found], -1, 0).T @ weights.T / sizes, -1, 0) for each in values]
    numbers = say(*means)
    return jackknife(float(numbers[0]), numbers[1:], within).record() if np.isfinite(numbers[0]) else None
