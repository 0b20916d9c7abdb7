"""Means over rows of clusters of unequal size."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.estimands import Pooled, Rows, measure
from kvprobe.stats import DIFFERENCE, estimate


def pooled(*tables: Rows, **more: Any) -> dict[str, Any]:
    """The mean of the first table, less that of the second."""
    table = pd.concat([own.assign(kind=str(number)) for number, own in enumerate(tables)])
    less = {"kind": "1"} if len(tables) > 1 else None
    found = measure(table, [Pooled(name="gap", of="kl", where={"kind": "0"}, less=less, **more)]).get("gap")
    return found.record() if found else {}


def test_means_and_differences_of_rows_count_the_clusters_that_have_any():
    values, items = np.random.default_rng(1).normal(size=30), np.repeat(np.arange(10), 3)
    rows = pd.DataFrame({"sample": items, "kl": values})
    known = rows.drop(index=[0, 1, 5, 27, 28, 29])
    unequal = rows.assign(kl=known["kl"])
    expected = estimate(known["kl"].to_numpy(), known["sample"].to_numpy())
    assert pooled(unequal) == pytest.approx(expected.record())
    one = rows[rows["sample"] == 2]
    assert pooled(one) == pooled(rows, one) == {}, "one item has no interval"
    less = estimate(items.astype(float), items)
    assert pooled(rows, rows.assign(kl=values - items)) == pytest.approx(less.record())
    some = pooled(rows, rows[rows["sample"] > 1])
    assert (some["mean"], some["clusters"]) == (pytest.approx(values.mean() - values[6:].mean()), 10)
    alike = pooled(rows.assign(kl=1.0), rows.assign(kl=1.0), within=DIFFERENCE)
    assert alike["low"] < 0 < alike["high"]
