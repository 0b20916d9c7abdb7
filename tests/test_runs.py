"""Runs: named by their settings, resumable, refusing to mix."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from kvprobe.runs import Run


@dataclass(frozen=True)
class Settings:
    seed: int = 3
    samples: int = 10


def test_the_same_settings_find_the_same_unfinished_run(tmp_path: Path):
    first = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    first.part("piece").write_text("kept")
    again = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    assert again.path == first.path
    assert again.part("piece").read_text() == "kept"


def test_other_settings_get_another_run(tmp_path: Path):
    one = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    other = Run.open("study", Settings(seed=4), "weights", "cpu, float32", tmp_path)
    assert one.path != other.path


def test_a_named_run_refuses_other_settings(tmp_path: Path):
    Run.open("study", Settings(), "weights", "cpu, float32", tmp_path, "mine")
    with pytest.raises(ValueError, match="other settings"):
        Run.open("study", Settings(seed=4), "weights", "cpu, float32", tmp_path, "mine")


def test_an_unfinished_run_refuses_to_go_on_with_other_weights(tmp_path: Path):
    Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    with pytest.raises(ValueError, match="begun with another model"):
        Run.open("study", Settings(), "other weights", "cpu, float32", tmp_path)


def test_a_foreign_folder_is_not_taken_over(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="not a run"):
        Run.open("study", Settings(), "weights", "cpu, float32", tmp_path, "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_finishing_writes_results_and_drops_intermediate_ones(tmp_path: Path):
    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    run.part("piece").write_text("kept")
    assert not run.finished
    run.save_table("samples", pd.DataFrame({"sample": [0, 1]}))
    run.finish({"accuracy": 0.5}, {"title": "t"})
    loaded = Run.load(run.path)
    assert loaded.finished
    assert loaded.metrics == {"accuracy": 0.5}
    assert list(loaded.df()["sample"]) == [0, 1]
    assert not (run.path / "parts").exists()
    assert loaded.config == {"study": "study", "settings": {"seed": 3, "samples": 10}}


def test_the_environment_says_what_it_ran_on(tmp_path: Path):
    environment = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path).environment
    assert environment["seed"] == 3
    assert environment["model"] == "weights"
    assert environment["versions"]["torch"]
    assert json.dumps(environment)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="not a run directory"):
        Run.load(tmp_path)


def test_an_unfinished_run_has_no_tables(tmp_path: Path):
    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    with pytest.raises(ValueError, match="unfinished"):
        run.df()
    with pytest.raises(ValueError, match="unfinished"):
        _ = run.metrics
