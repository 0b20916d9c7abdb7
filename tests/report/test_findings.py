"""Findings: looked up by exact keys, kept in order, and the same again after a journey through JSON."""

import json
from math import nan

import pytest

from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import Estimate
from tests.refusals import refused


def three() -> Findings:
    findings = Findings(
        [
            Finding("lost", {"task": "recite", "rate": 10.0}, Estimate(0.5, 0.25, 0.75, 9, 0.0, 1.0), "points", 2),
            Finding("lost", {"task": "recite", "rate": 2.0}, Estimate(0.1, clusters=3, smallest=0.0, largest=0.5)),
        ]
    )
    findings.number("cliff", None, "%", task="recite")
    return findings


def test_a_finding_is_found_under_exactly_its_keys():
    findings = three()
    assert findings.at("lost", rate=10, task="recite").mean == 0.5
    assert findings.get("lost", task="recite") is None
    assert findings.at("cliff", task="recite").unknown
    assert [finding.keys["rate"] for finding in findings.where("lost", task="recite")] == [10.0, 2.0]
    assert [finding.keys["rate"] for finding in findings.where("lost", rate=(2.0, 3.0))] == [2.0]
    assert not findings.where("cliff", rate=(10.0, 2.0))
    assert findings.values("lost", "rate") == [10.0, 2.0]
    assert findings.names == ["lost", "cliff"]
    assert "lost" in findings
    assert "kept" not in findings


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("lots", {}, "no finding called 'lots'; did you mean 'lost'"),
        (
            "lost",
            {"task": "recite"},
            "no lost(task='recite'); an example of what there is: lost(task='recite', rate=10.0)",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(name: str, keys: dict[str, str], words: str):
    refused(lambda: three().at(name, **keys), words)


def test_findings_are_the_same_after_json():
    findings = three()
    again = Findings.from_records(json.loads(json.dumps(findings.records(), allow_nan=False)))
    # NaN is not equal to itself, so what is compared is text.
    assert repr(list(again)) == repr(list(findings))


def test_the_table_has_a_row_for_each_and_a_column_for_each_key():
    table = three().frame()
    assert table.columns[:4].tolist() == ["name", "task", "rate", "unit"]
    assert table["mean"].tolist()[:2] == [0.5, 0.1]
    assert table["rate"].isna().tolist() == [False, False, True]
    assert three().frame("lost").shape[0] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mean": "0.5"}, "'mean' is '0.5', a str; expected a float"),
        ({"keys": {"task": ["recite"]}}, "'task' is of entry, a list"),
        ({"keys": [1]}, "'keys' must be a mapping"),
        ({"name": 1}, "'name' is 1, a int"),
        ({"keys": {"mean": 1}}, "are names of columns"),
        ({"extra": 1}, "no key of an entry of the findings called 'extra'"),
    ],
)
def test_records_of_another_shape_are_refused(change: dict[str, object], words: str):
    (record, *_) = three().records()
    refused(lambda: Findings.from_records([record | change]), words.replace("of entry", "of 1 entries"))


def test_the_same_finding_twice_is_refused():
    findings = three()
    with pytest.raises(ValueError, match="added twice"):
        findings.number("cliff", 3, task="recite")
    refused(lambda: Findings.from_records(findings.records() + findings.records()[:1]), "added twice")


def test_the_repr_is_short_and_says_what_is_there():
    assert repr(three()) == "Findings(2 lost(task, rate); 1 cliff(task))"
    many = Findings(Finding(f"number{place}", {"key": place}, Estimate(nan)) for place in range(500))
    assert len(repr(many)) <= 1000
