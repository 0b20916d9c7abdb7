"""A finished run is concluded again from its tables, without its measurements."""

import json
from pathlib import Path

import pytest

from kvprobe.cli import runs
from kvprobe.experiments.runs import Run
from kvprobe.studies import find
from kvprobe.studies.routing import Config
from tests.refusals import refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return find("routing").run(Config(problems=2, start=2), tmp_path_factory.mktemp("runs"))


def test_a_run_is_concluded_again_from_its_tables(run: Run):
    before = run.metrics
    run.finish({**before, "findings": [], "facts": {}})
    (run.path / "figures" / "course_by_step.png").unlink()
    runs.report(run.path, again=True)
    assert run.metrics == before
    assert (run.path / "figures" / "course_by_step.png").is_file()
    assert "is routed" in (run.path / "report.html").read_text()


def test_the_report_says_which_version_measured_and_which_concluded(run: Run):
    before = run.environment
    older = {**before, "versions": {**before["versions"], "kvprobe": "0.0.1"}, "commit": None}
    (run.path / "env.json").write_text(json.dumps(older))
    runs.report(run.path, again=True)
    said = "Measured with kvprobe 0.0.1, concluded again with kvprobe "
    assert [warning.partition(said)[1] for warning in run.metrics["warnings"]][-1:] == [said]
    assert said in (run.path / "report.html").read_text()
    (run.path / "env.json").write_text(json.dumps(before))


def test_an_unfinished_run_and_two_runs_are_not_concluded_again(run: Run, tmp_path: Path):
    refused(lambda: runs.report(run.path, run.path, again=True), "concludes one run; name one")
    (run.path / "metrics.json").rename(tmp_path / "metrics.json")
    refused(lambda: runs.report(run.path, again=True), "the run is unfinished, start it again to resume")
