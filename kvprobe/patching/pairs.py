"""Several pairs of runs under one grid, with intervals over pairs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.arguments import check_fields, checked_arguments
from kvprobe.brief import Brief
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.executors import Executor
from kvprobe.inference.elsewhere import each
from kvprobe.inference.model import Model
from kvprobe.patching.along import Along
from kvprobe.patching.attribution import Attribution
from kvprobe.patching.donor import Align
from kvprobe.patching.grid import Over
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, UNDEFINED, Metric
from kvprobe.patching.patch_sweep import patch_sweep
from kvprobe.patching.plan import Reads
from kvprobe.patching.rows import ROWS
from kvprobe.progress import Bar
from kvprobe.ranks import rank_correlation
from kvprobe.stats import Estimate, ratio
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import Rows


@dataclass(frozen=True, repr=False)
class Pair(Brief):
    """Two runs that differ in a fact, and what is read after them and measured.

    Attributes:
        cluster: what the pair shares with others; intervals keep pairs of one cluster together. By default each pair is
            a cluster.
    """

    base: KVCache
    donor: KVCache
    suffix: Tokens | str
    metric: Metric | KL
    cluster: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, repr=False)
class PairMaps(Brief):
    """A map for each pair.

    Attributes:
        table: as `PatchMap.df`, with `pair`, `cluster`, and `way`, the donor's metric minus the base's; 0 where the two
            do not differ, up to rounding.
    """

    table: pd.DataFrame

    def _facts(self) -> Iterable[str]:
        ways = self.table.drop_duplicates("pair")["way"].to_numpy(float)
        yield f"{len(ways)} pairs, {len(self.table)} cells"
        if alike := int((ways == 0).sum()):
            yield f"in {alike} pairs {UNDEFINED}"

    def df(self) -> pd.DataFrame:
        return self.table

    def summary(self, by: Sequence[str] = ("layer", "segment", "part")) -> pd.DataFrame:
        """Mean `effect` and pooled `normalised` of each group of cells over pairs, each with its 95 % interval
        (`…_low`, `…_high`) over clusters of pairs. With fewer clusters than `stats.FEWEST` an interval is NaN, and only
        the range of the clusters' values is given (`…_smallest`, `…_largest`).

        `normalised` is the mean effect over the mean way from base to donor, so that a pair in which the two hardly
        differ does not dominate; NaN where they do not differ in any pair.
        """
        return summarise(self.table, by)


@checked_arguments
def patch_pairs(
    model: Model,
    pairs: Sequence[Pair],
    over: Over = ("layer", "segment"),
    *,
    parts: Sequence[str] | None = None,
    reads: Reads = "reader",
    align: Align = None,
    along: Along | None = None,
    rows: int = ROWS,
    progress: bool = True,
    executor: Executor | None = None,
) -> PairMaps:
    """One sweep for each pair; see `patch_sweep` for the grid and the other arguments.

    Args:
        executor: where pairs are worked on side by side, see `kvprobe.executors`; here by default. Numbers are the same
            in float32 on machines of one kind.

    Raises:
        UserError: there are no pairs, or as `patch_sweep`.
    """
    if not pairs:
        raise UserError("There are no pairs to patch; give at least one.")
    asked = {"over": over, "parts": parts, "reads": reads, "align": align, "along": along, "rows": rows}
    doing, unit = "Patching pairs", "pair"
    if executor is None:
        maps = [_swept(model, pair, asked) for pair in Bar(pairs, desc=doing, unit=unit, disable=not progress)]
    else:
        maps = each(model, _swept, pairs, asked, executor=executor, doing=doing, unit=unit, progress=progress)
    tables = [table_of(patched, number, pairs[number].cluster) for number, patched in enumerate(maps)]
    return PairMaps(pd.concat(tables, ignore_index=True))


def _swept(model: Model, pair: Pair, asked: Mapping[str, Any]) -> PatchMap:
    """The map of one pair."""
    return patch_sweep(model, pair.base, pair.donor, pair.suffix, pair.metric, **asked, progress=False)


def table_of(patched: PatchMap | Attribution, pair: int, cluster: str | None = None) -> pd.DataFrame:
    """The cells of one pair as `summarise` takes them."""
    way = (patched.checked if isinstance(patched, Attribution) else patched).way
    ends = {"base": patched.base, "donor": patched.donor, "way": way}
    return patched.df().assign(pair=pair, cluster=str(pair) if cluster is None else cluster, **ends)


def agreements(table: Rows, score: str) -> list[float]:
    """The rank correlation of a first-order score with the exact effect within each pair, over the cells that were
    patched exactly, too; none of a pair in which either is constant.

    Args:
        table: of `table_of`, from attributions.
        score: `score` or `linear`.
    """
    checked = table[table["effect"].notna()]
    rhos = [rank_correlation(*pair[[score, "effect"]].to_numpy(float).T) for _, pair in checked.groupby("pair")]
    return [rho for rho in rhos if np.isfinite(rho)]


def summarise(table: pd.DataFrame, by: Sequence[str], comparisons: int = 1) -> pd.DataFrame:
    """See `PairMaps.summary`.

    Args:
        comparisons: see `stats.interval`.

    Raises:
        UserError: a column that the table does not have.
    """
    if missing := [column for column in by if column not in table]:
        raise UserError(f"The maps have no column {missing[0]!r}; choose from {', '.join(table.columns)}.")
    rows = []
    for _, cells in table.groupby(list(by), sort=False):
        clusters = pd.factorize(cells["cluster"])[0]
        count, effect, way = (
            np.bincount(clusters, column) for column in (np.ones(len(cells)), cells["effect"], cells["way"])
        )
        rows.append(
            {
                **{column: cells[column].iloc[0] for column in by},
                "pairs": cells["pair"].nunique(),
                "clusters": len(count),
                **ratio(effect, count, comparisons=comparisons).columns("effect"),
                **ratio(effect, way, comparisons=comparisons).columns("normalised"),
            }
        )
    return pd.DataFrame(rows)


def pooled(row: Mapping[Any, Any], column: str = "normalised") -> Estimate:
    """The estimate that a row of `summarise` holds."""
    return Estimate.of_columns(row, column, int(row["clusters"]))
