"""Estimands: from rows, one per sample and condition, to findings with intervals over clusters.

A cluster (an item, a conversation) counts once: its rows are averaged first. Conditions of the same clusters are
compared by pairing, either as a column that `beside` adds, or as a `Difference`. docs/results/coverage.md reports how
well the intervals cover.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from kvprobe.probing.intervals import held_out
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.stats import UNBOUNDED, Estimate, binomial, estimate, natural, pooled, ratio
from kvprobe.tidy import Rows, Where, chosen, cluster_means, groups

Values = Float[np.ndarray, "clusters"]
HEADLINE: Mapping[str, Any] = {"together": (), "family": "headline"}
"""Of estimands of several names from which a page's verdicts are chosen: all their intervals hold together."""


@dataclass(frozen=True, kw_only=True)
class Estimand(ABC):
    """What is estimated from rows, once for each combination of the values of some columns.

    Attributes:
        name: of the findings.
        of: the column; where it is missing, a row does not count.
        by: columns whose values become keys.
        where: which rows count.
        keys: more keys, the same for all findings.
        cluster: the column that tells independent clusters apart.
        within: the natural range; without it, that of shares for columns of 0 and 1 that have no unit, and unlimited
            for others. See `kvprobe.stats.natural`.
        unit: such as `nats`.
        together: keys among whose equal values the intervals of a family hold together (Bonferroni), `()` for the whole
            family; None for each by itself, about which nothing may be claimed.
        family: its name, which estimands of other names may share; that of the findings by default.
        claims: how many its intervals hold together over, where the family is not all measured at once.
    """

    name: str
    of: str
    by: tuple[str, ...] = ()
    where: Where = field(default_factory=dict)
    keys: Mapping[str, Key] = field(default_factory=dict)
    cluster: str = "sample"
    within: tuple[float, float] | None = None
    unit: str = ""
    together: tuple[str, ...] | None = None
    family: str = ""
    claims: int = 0

    @property
    def range(self) -> tuple[float, float] | None:
        """The natural range, where it does not depend on the values."""
        return UNBOUNDED if self.within is None and self.unit else self.within

    @abstractmethod
    def cells(self, rows: Rows) -> "list[PendingFinding]":
        """What is to be estimated, from all rows."""


@dataclass(frozen=True, kw_only=True)
class Mean(Estimand):
    """The mean over clusters; of fewer than two there is no finding."""

    def cells(self, rows: Rows) -> "list[PendingFinding]":
        return several(self.cell(keys, values) for keys, values in by_cluster(rows, self, self.where))

    def cell(self, keys: Mapping[str, Key], values: Values) -> "PendingFinding":
        known = values[np.isfinite(values)]
        return PendingFinding(self, keys, len(known), lambda count: self.estimated(known, count))

    def estimated(self, known: Values, comparisons: int) -> Estimate:
        return estimate(known, None, self.range, comparisons)


@dataclass(frozen=True, kw_only=True)
class HeldOut(Mean):
    """The mean over clusters of what a probe that was trained on others reads; see `kvprobe.probing.intervals`."""

    def estimated(self, known: Values, comparisons: int) -> Estimate:
        return held_out(known, np.arange(len(known)), self.within or UNBOUNDED, comparisons)


@dataclass(frozen=True, kw_only=True)
class Share(Estimand):
    """The share of clusters, each of which is one trial however often it was measured; see `kvprobe.stats.binomial`."""

    def cells(self, rows: Rows) -> "list[PendingFinding]":
        known = ((keys, values[np.isfinite(values)]) for keys, values in by_cluster(rows, self, self.where))
        return [self.cell(keys, values) for keys, values in known if len(values)]

    def cell(self, keys: Mapping[str, Key], values: Values) -> "PendingFinding":
        right = min(float(values.sum()), len(values))
        return PendingFinding(self, keys, len(values), lambda count: binomial(right, len(values), count))


@dataclass(frozen=True, kw_only=True)
class Difference(Mean):
    """The mean of some rows less that of others, paired by cluster; clusters that lack either do not count.

    Attributes:
        less: which rows are taken away; `where` says from which.
    """

    less: Where

    def cells(self, rows: Rows) -> "list[PendingFinding]":
        others = {tuple(keys.values()): values for keys, values in by_cluster(rows, self, self.less)}
        cells = []
        for keys, values in by_cluster(rows, self, self.where):
            if (other := others.get(tuple(keys.values()))) is not None:
                known = np.isfinite(values - other)
                within = natural(self.range, values[known], other[known])
                cells.append(replace(self, within=within).cell(keys, values - other))
        return several(cells)


@dataclass(frozen=True, kw_only=True)
class HeldOutDifference(Difference, HeldOut):
    """A difference of which at least one side is what a probe reads that was trained on other clusters."""


@dataclass(frozen=True, kw_only=True)
class Ratio(Estimand):
    """The sum over clusters of one column divided by that of another; a row that lacks either does not count.

    Attributes:
        over: the other column.
    """

    over: str

    def cells(self, rows: Rows) -> "list[PendingFinding]":
        columns = [self.of, self.over]
        known = rows[np.isfinite(rows[columns].to_numpy(float)).all(1)]
        tops, bottoms = (by_cluster(known, replace(self, of=column), self.where) for column in columns)
        return several(self.cell(keys, top, bottom) for (keys, top), (_, bottom) in zip(tops, bottoms, strict=True))

    def cell(self, keys: Mapping[str, Key], top: Values, bottom: Values) -> "PendingFinding":
        known, within = np.isfinite(top) & np.isfinite(bottom), self.within or UNBOUNDED
        return PendingFinding(
            self, keys, int(known.sum()), lambda count: ratio(top[known], bottom[known], within, count)
        )


@dataclass(frozen=True, kw_only=True)
class Pooled(Estimand):
    """The mean over rows, where chance decides how many of them a cluster has; or that less the mean of other rows; see
    `kvprobe.stats.pooled`.

    Of fewer than two clusters there is no finding.

    Attributes:
        less: the other rows, if any; `where` says from which they are taken away. A cluster may have rows of one kind.
    """

    less: Where | None = None

    def cells(self, rows: Rows) -> "list[PendingFinding]":
        kinds = [(keys, [some]) for keys, some in groups(rows, self.by, self.where)]
        if self.less is not None:
            less = {tuple(keys.values()): others for keys, others in groups(rows, self.by, self.less)}
            kinds = [(keys, [*one, less[place]]) for keys, one in kinds if (place := tuple(keys.values())) in less]
        return several(self.cell(keys, both) for keys, both in kinds)

    def cell(self, keys: Mapping[str, Key], kinds: Sequence[Rows]) -> "PendingFinding":
        known = [rows[np.isfinite(rows[self.of].to_numpy(float))] for rows in kinds]
        clusters = min(rows[self.cluster].nunique() for rows in known)
        columns = [(rows[self.of].to_numpy(float), rows[self.cluster].to_numpy()) for rows in known]
        return PendingFinding(self, keys, clusters, lambda count: pooled(columns, self.range, count))


@dataclass(frozen=True, kw_only=True)
class Total(Estimand):
    """The sum over rows, which has no interval."""

    def cells(self, rows: Rows) -> "list[PendingFinding]":
        totals = ((keys, Estimate(float(some[self.of].sum()))) for keys, some in groups(rows, self.by, self.where))
        return [PendingFinding(self, keys, 0, lambda _, total=total: total) for keys, total in totals]


@dataclass(frozen=True)
class PendingFinding:
    """One finding to be: `estimated` takes the number of comparisons over which its interval shall hold."""

    estimand: Estimand
    by: Mapping[str, Key]
    clusters: int
    estimated: Callable[[int], Estimate]

    @property
    def keys(self) -> dict[str, Key]:
        return {**self.estimand.keys, **self.by}

    @property
    def family(self) -> tuple[str, tuple[Key, ...]] | None:
        """What it shares with the findings with which its interval holds together; None if it stands alone."""
        estimand = self.estimand
        if estimand.together is None:
            return None
        return estimand.family or estimand.name, tuple(self.keys[key] for key in estimand.together)


def several(cells: "Iterable[PendingFinding]") -> "list[PendingFinding]":
    """Those of at least two clusters."""
    return [cell for cell in cells if cell.clusters > 1]


def measure(rows: Rows, estimands: Iterable[Estimand], *others: tuple[Rows, Iterable[Estimand]]) -> Findings:
    """The findings of all estimands, from all rows.

    Args:
        others: more tables with estimands of their own; a family may span tables.
    """
    tables = ((rows, estimands), *others)
    cells = [cell for rows, estimands in tables for estimand in estimands for cell in estimand.cells(rows)]
    sizes = Counter(cell.family for cell in cells)
    findings = Findings()
    for cell in cells:
        estimand = cell.estimand
        count = estimand.claims or (0 if cell.family is None else sizes[cell.family])
        findings.add(Finding(estimand.name, cell.keys, cell.estimated(max(1, count)), estimand.unit, count))
    return findings


def by_cluster(rows: Rows, estimand: Estimand, where: Where) -> list[tuple[dict[str, Key], Values]]:
    """For each combination of `by`, the mean of each cluster of all rows in order; NaN for one that has no value."""
    by, of, cluster = estimand.by, estimand.of, estimand.cluster
    clusters = np.unique(rows[cluster].unique())  # fewer to sort
    return cluster_means(chosen(rows, where, (*by, of, cluster)), by, of, cluster, clusters)
