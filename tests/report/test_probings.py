"""Findings of probings are the numbers of their tables, with the intervals that stand beside them."""

from math import isnan, nan

import pandas as pd

from kvprobe.report.findings import Findings
from kvprobe.report.probings import probing_findings

ENDS = {"low": 0.2, "high": 0.4, "smallest": 0.1, "largest": 0.5}
AT = {"arm": "masked", "split": "paired"}


def named(*names: str) -> dict[str, float]:
    return {f"{name}_{end}": value for name in names for end, value in ENDS.items()}


def test_numbers_and_intervals_are_those_of_the_tables():
    site = {**AT, "family": "v", "read": "mean", "low": 0.2, "high": 0.4}
    records = {
        "probes": [
            {**site, "layer": 0, "accuracy": 0.3, "p_family": 0.9},
            {**site, "layer": 3, "accuracy": 0.6, "p_family": 0.02},
            {**site, "layer": 4, "accuracy": 0.5, "p_family": 0.04},
            {**site, "arm": "hidden", "layer": 0, "accuracy": 0.3, "p_family": nan},
        ],
        "readings": [
            {**AT, "reading": "retained", "accuracy": 0.3, "bits": 0.7, "lead": nan, **named("accuracy", "bits")},
            {**AT, "reading": "text", "accuracy": 0.1, "bits": nan, "lead": 0.2, **named("accuracy", "lead")},
        ],
        "sparse": [{**AT, "k": 8, "accuracy": 0.3, "low": 0.2, "high": 0.4, "random": 0.1}],
        "codelength": [{**AT, "bits": bits, "context_bits": 3.3, "uniform_bits": 3.4} for bits in (2.5, 3.5)],
        "picks": [{**AT, "fold": fold, "family": "v", "layer": 3, "read": "mean"} for fold in (0, 1)],
    }
    tables = {name: pd.DataFrame(rows) for name, rows in records.items()}
    findings = Findings(probing_findings(tables, clusters=9))
    accuracy = findings.at("accuracy", **AT, reading="retained")
    assert (accuracy.mean, accuracy.low, accuracy.high, accuracy.clusters, accuracy.largest) == (0.3, 0.2, 0.4, 9, 0.5)
    assert findings.finding("bits", **AT, reading="retained").unit == "bits"
    assert [finding.keys["reading"] for finding in findings.where("lead")] == ["text"]
    assert findings.at("site", **AT, family="v", read="mean", layer=3).mean == 0.6
    scanned = {name: findings.at(name, **AT).mean for name in ("sites", "detected", "lowest_layer", "best", "p")}
    assert scanned == {"sites": 3, "detected": 2, "lowest_layer": 3, "best": 0.6, "p": 0.02}
    assert findings.values("p", "arm") == ["masked"]
    assert findings.at("picked", **AT, family="v", layer=3, read="mean").mean == 2
    assert findings.at("codelength", **AT, code="bits").mean == 3.0
    assert isnan(findings.at("sparse_random", **AT, k=8).low)
