"""Estimands against the plain formulas, by hand: clusters count once, pairs are paired, families hold together."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.estimands import (
    Difference,
    Estimand,
    HeldOut,
    HeldOutDifference,
    Mean,
    Pooled,
    Ratio,
    Share,
    Total,
    measure,
)
from kvprobe.stats import DIFFERENCE, Estimate, binomial, estimate, ratio
from kvprobe.tidy import Rows, beside
from tests.refusals import refused


def rows(items: int = 12, repeats: int = 2, seed: int = 0) -> pd.DataFrame:
    """Two faults at two rates on every item, some numbers missing, in an order that is not that of the items."""
    rng = np.random.default_rng(seed)
    records = [
        {
            "sample": item,
            "fault": fault,
            "rate": rate,
            "x": rng.normal() + item,
            "y": 2 + rng.random(),
            "right": rng.random() < 0.4,
        }
        for item in range(items)
        for fault in ("noise", "zeros")
        for rate in (2.0, 10.0)
        for _ in range(repeats)
    ]
    table = pd.DataFrame(records)
    table.loc[(table["sample"] == 3) & (table["fault"] == "noise"), "x"] = np.nan
    return table.sample(frac=1, random_state=seed, ignore_index=True)


def test_a_difference_of_what_probes_read_is_as_wide_as_what_they_read():
    table = rows(20)
    table["x"] = table["x"].where(table["fault"] == "noise", 0.0)
    where, less = {"fault": "noise"}, {"fault": "zeros"}
    found = measure(
        table,
        [
            HeldOutDifference(name="pair", of="x", where=where, less=less),
            HeldOut(name="read", of="x", where=where),
            Difference(name="narrow", of="x", where=where, less=less),
        ],
    )
    pair, read, narrow = (found.at(name).ends for name in ("pair", "read", "narrow"))
    assert pair == pytest.approx(read)
    assert pair[0] < narrow[0]
    assert narrow[1] < pair[1]


def test_rows_that_lack_one_of_two_columns_do_not_bias_their_ratio():
    table = pd.DataFrame({"sample": np.repeat(range(12), 4), "x": np.tile([1.0, 2.0, 3.0, 9.0], 12)}).assign(
        y=lambda t: t.x
    )
    table.loc[table["x"] == 9, "x"] = np.nan
    assert measure(table, [Ratio(name="same", of="x", over="y")]).at("same").mean == 1.0


def test_a_cluster_that_lacks_an_arm_does_not_take_the_interval_of_shares_from_a_difference():
    table = pd.DataFrame(
        {"sample": [*range(11)] * 2, "arm": ["one"] * 11 + ["other"] * 11, "x": [1.0] * 11 + [0.0] * 11}
    )
    table.loc[21, "x"] = np.nan
    more = Difference(name="more", of="x", where={"arm": "one"}, less={"arm": "other"})
    (with_gap,), (without,) = measure(table, [more]), measure(table[table["sample"] < 10], [more])
    assert with_gap.value == without.value
    assert with_gap.value.low < 0.5


def by_item(table: pd.DataFrame, column: str, **where: object) -> np.ndarray:
    for key, value in where.items():
        table = table[table[key] == value]
    return table.groupby("sample")[column].mean().dropna().to_numpy(float)


def same(one: Estimate, other: Estimate) -> bool:
    return np.allclose(list(vars(one).values()), list(vars(other).values()), rtol=1e-12, equal_nan=True)


def test_a_mean_counts_each_cluster_once_however_often_it_was_measured():
    table = rows()
    uneven = pd.concat([table, table[table["sample"] == 5]], ignore_index=True)
    findings = measure(uneven, [Mean(name="x", of="x", by=("fault", "rate"))])
    assert len(findings) == 4
    for finding in findings:
        values = by_item(table, "x", **finding.keys)
        assert len(values) == (11 if finding.keys["fault"] == "noise" else 12)
        assert same(finding.value, estimate(values))


def test_a_share_has_as_many_trials_as_clusters():
    table = rows()
    findings = measure(table, [Share(name="right", of="right", where={"fault": "zeros", "rate": (2.0, 10.0)})])
    values = by_item(table, "right", fault="zeros")
    assert same(findings.at("right"), binomial(values.sum(), 12))


def test_shares_that_hold_together_are_wider():
    table = rows()
    alone, both = (
        measure(table, [Share(name="right", of="right", by=("fault",), together=together)]) for together in (None, ())
    )
    for fault in ("zeros", "noise"):
        successes, trials = by_item(table, "right", fault=fault).sum(), alone.at("right", fault=fault).clusters
        assert same(alone.at("right", fault=fault), binomial(successes, trials))
        assert same(both.at("right", fault=fault), binomial(successes, trials, 2))
        assert both.at("right", fault=fault).low < alone.at("right", fault=fault).low


def test_findings_by_true_and_false_are_refused():
    table = rows().assign(was=True)
    refused(lambda: measure(table, [Mean(name="x", of="x", by=("was",))]), "'was', a column of True and False")


def test_rows_that_lack_what_findings_are_by_are_refused():
    table = rows()
    table.loc[table.index[:3], "fault"] = None
    refused(
        lambda: measure(table, [Mean(name="x", of="x", by=("fault",))]), f"'fault', which 3 of {len(table)} rows lack"
    )
    chosen = measure(table, [Mean(name="x", of="x", by=("fault",), where={"fault": "noise"})])
    assert chosen.at("x", fault="noise").clusters == 11


def test_a_difference_of_a_kind_of_few_clusters_has_no_interval():
    table = rows()
    few = table[(table["fault"] == "zeros") | table["sample"].isin([0, 1])]
    [finding] = measure(few, [Pooled(name="more", of="x", where={"fault": "noise"}, less={"fault": "zeros"})])
    assert finding.value.clusters == 2
    assert not finding.value.has_interval


def test_a_share_of_nothing_measured_is_no_finding():
    table = rows().assign(right=np.nan)
    assert not len(measure(table, [Share(name="right", of="right", by=("fault",))]))


def test_a_difference_is_paired_by_cluster():
    table = rows()
    less = Difference(name="more", of="x", by=("rate",), where={"fault": "noise"}, less={"fault": "zeros"})
    for finding in measure(table, [less]):
        at_rate = table[table["rate"] == finding.keys["rate"]].pivot_table(index="sample", columns="fault", values="x")
        gaps = (at_rate["noise"] - at_rate["zeros"]).dropna().to_numpy()
        assert finding.value.clusters == 11
        assert same(finding.value, estimate(gaps))


def test_taking_away_what_stands_beside_is_the_same_as_a_difference():
    table = rows()
    table["less"] = table["x"] - beside(table, "x", {"fault": "zeros"}, ("sample", "rate"))
    joined = measure(table, [Mean(name="more", of="less", by=("rate",), where={"fault": "noise"})])
    paired = measure(
        table, [Difference(name="more", of="x", by=("rate",), where={"fault": "noise"}, less={"fault": "zeros"})]
    )
    for finding in paired:
        assert same(finding.value, joined.at("more", **finding.keys))


def test_a_ratio_is_of_sums_over_clusters():
    table = rows()
    findings = measure(table, [Ratio(name="part", of="x", over="y", by=("fault",))])
    zeros = [by_item(table, column, fault="zeros") for column in ("x", "y")]
    assert same(findings.at("part", fault="zeros"), ratio(*zeros))
    assert findings.at("part", fault="noise").clusters == 11


def test_intervals_hold_together_over_the_family_that_is_named():
    def comparisons_and_widths(together: tuple[str, ...] | None) -> list[tuple[int, float]]:
        mean = Mean(name="x", of="x", by=("fault", "rate"), within=DIFFERENCE, together=together)
        return [(finding.comparisons, finding.value.high - finding.value.low) for finding in measure(rows(), [mean])]

    alone, pairs, everything = (comparisons_and_widths(together) for together in (None, ("fault",), ()))
    assert {count for count, _ in alone} == {0}
    assert {count for count, _ in pairs} == {2}
    assert {count for count, _ in everything} == {4}
    findings = measure(rows(), [Mean(name="x", of="x", by=("fault", "rate"), together=())])
    values = by_item(rows(), "x", fault="zeros", rate=2.0)
    assert same(findings.at("x", fault="zeros", rate=2.0), estimate(values, comparisons=4))


def test_a_family_goes_over_all_estimands_of_one_name():
    halves: list[Estimand] = [
        Mean(name="x", of="x", where={"fault": fault}, keys={"fault": fault}, together=())
        for fault in ("noise", "zeros")
    ]
    assert [finding.comparisons for finding in measure(rows(), halves)] == [2, 2]


def test_a_named_family_goes_over_estimands_of_several_names():
    several: list[Estimand] = [
        Mean(name=name, of="x", by=("fault",), together=(), family=family)
        for name, family in (("x", "both"), ("y", "both"), ("z", ""))
    ]
    assert [finding.comparisons for finding in measure(rows(), several)] == [4, 4, 4, 4, 2, 2]


def test_a_family_spans_tables_that_are_measured_together():
    zeros, gaussian = (Mean(name=name, of="x", by=("rate",), together=(), family="both") for name in ("zeros", "noise"))
    together = measure(rows(), [zeros], (rows(seed=1), [gaussian]))
    assert [(finding.name, finding.comparisons) for finding in together] == [("zeros", 4)] * 2 + [("noise", 4)] * 2
    assert together.at("noise", rate=2.0).mean == measure(rows(seed=1), [gaussian]).at("noise", rate=2.0).mean


def test_what_was_measured_in_one_cluster_gives_no_mean_and_what_was_not_gives_nothing():
    table = rows(items=1)
    assert not len(measure(table, [Mean(name="x", of="x", by=("fault",))]))
    assert not len(measure(rows(), [Mean(name="x", of="x", where={"fault": "none"})]))
    assert measure(table, [Total(name="count", of="y", where={"fault": "zeros"})]).at("count").mean > 8


def test_keys_are_plain_values_in_the_order_of_the_rows():
    table = rows().sort_values(["rate", "fault"], ascending=False)
    findings = measure(table, [Total(name="count", of="y", by=("rate", "fault"), keys={"part": "all"})])
    assert findings.values("count", "rate") == [10.0, 2.0]
    assert all(type(value) in (str, float) for finding in findings for value in finding.keys.values())
    assert findings.at("count", rate=2.0, fault="zeros", part="all").mean == pytest.approx(
        table[(table["rate"] == 2) & (table["fault"] == "zeros")]["y"].sum()
    )


def pooled(*tables: Rows, **more: Any) -> dict[str, Any]:
    """The mean of the first table, less that of the second."""
    table = pd.concat([rows_of_kind.assign(kind=str(number)) for number, rows_of_kind in enumerate(tables)])
    less = {"kind": "1"} if len(tables) > 1 else None
    gap = measure(table, [Pooled(name="gap", of="kl", where={"kind": "0"}, less=less, **more)]).get("gap")
    return gap.record() if gap else {}


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
    difference = pooled(rows, rows[rows["sample"] > 1])
    assert (difference["mean"], difference["clusters"]) == (pytest.approx(values.mean() - values[6:].mean()), 10)
    alike = pooled(rows.assign(kl=1.0), rows.assign(kl=1.0), within=DIFFERENCE)
    assert alike["low"] < 0 < alike["high"]
