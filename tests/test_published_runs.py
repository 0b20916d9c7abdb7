"""Tables on pages of results hold the numbers of the runs that lie beside them."""

import json
import re
from pathlib import Path

import pytest

from kvprobe.experiments.study import Conclusion

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
COLUMNS = [
    ("gaussian", "accuracy"),
    ("gaussian", "published"),
    ("gaussian-channel", "accuracy"),
    ("zeros", "accuracy"),
    ("zeros", "published"),
    ("distractor", "accuracy"),
    ("distractor", "published"),
]


@pytest.mark.parametrize("rate", [2, 10, 30])
def test_the_table_of_gsm8k_is_that_of_its_run(rate: int):
    run = RESULTS / "runs" / "gsm8k-qwen2.5-coder-1.5b" / "metrics.json"
    findings = Conclusion.of(json.loads(run.read_text())).findings
    page = (RESULTS / "robustness.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {rate} % \|(.*)\|$", page, re.MULTILINE)
    assert row is not None
    cells = [cell.strip(" *") for cell in row[1].split("|")]
    for cell, (fault, name) in zip(cells, COLUMNS, strict=True):
        (finding,) = findings.where(name, fault=fault, rate=float(rate))
        share = finding.value
        assert cell == f"{100 * share.mean:.0f} % ({100 * share.low:.0f} to {100 * share.high:.0f})", (fault, name)
