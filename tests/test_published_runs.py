"""Tables on pages of results hold the numbers of the runs that lie beside them."""

import json
import re
from pathlib import Path

import pytest

from kvprobe.experiments.study import Conclusion
from kvprobe.report.findings import Finding, Findings

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


BANDS = {"0–6": "quarter 1", "7–13": "quarter 2", "14–20": "quarter 3", "21–27": "quarter 4"}


def findings_and_cells(run: str, row: str) -> tuple[Findings, list[str]]:
    """Of a run, and the cells of a row of the page that starts so."""
    metrics = json.loads((RESULTS / "runs" / run / "metrics.json").read_text())
    found = re.search(rf"^\| {row} \|(.*)\|$", (RESULTS / "robustness.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return Conclusion.of(metrics).findings, [cell.strip(" *") for cell in found[1].split("|")]


def written(finding: Finding) -> str:
    share = finding.value
    return f"{100 * share.mean + 1e-9:.0f} % ({100 * share.low:.0f} to {100 * share.high:.0f})"


@pytest.mark.parametrize("rate", [2, 10, 30])
def test_the_table_of_gsm8k_is_that_of_its_run(rate: int):
    findings, cells = findings_and_cells("gsm8k-qwen2.5-coder-1.5b", f"{rate} %")
    for cell, (fault, name) in zip(cells, COLUMNS, strict=True):
        (finding,) = findings.where(name, fault=fault, rate=float(rate))
        assert cell == written(finding), (fault, name)


@pytest.mark.parametrize("layers", BANDS)
def test_the_table_of_bands_is_that_of_its_run(layers: str):
    findings, cells = findings_and_cells("bands-qwen2.5-coder-1.5b", f"layers {layers}")
    columns = [("accuracy", "kv"), ("published", "kv"), ("accuracy", "k"), ("accuracy", "v")]
    for cell, (name, parts) in zip(cells, columns, strict=True):
        (finding,) = findings.where(name, parts=parts, band=BANDS[layers], rate=2.0)
        assert cell == written(finding), (name, parts)
