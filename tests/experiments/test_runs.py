"""Runs: named by their settings, resumable, refusing to mix."""

import errno
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.environment import _commit, short_commit
from kvprobe.experiments.parts import Parts, tensor_of_parts, text_of_part
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings, as_mapping, from_mapping
from kvprobe.files import write_whole
from kvprobe.inference.model import Model
from tests.models import any_model
from tests.refusals import refused

MODEL = "0" * 16 + "-0-0"


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    samples: int = 10
    rates: tuple[float, ...] = (1e-7, 2.0)


def test_the_same_settings_find_the_same_unfinished_run(tmp_path: Path):
    first = Run.open("study", Config(), "weights", "cpu, float32", tmp_path)
    first.part("piece").write_text("kept")
    again = Run.open("study", Config(), "weights", "cpu, float32", tmp_path)
    assert again.path == first.path
    assert again.part("piece").read_text() == "kept"


def test_other_settings_get_another_run(tmp_path: Path):
    one = Run.open("study", Config(), "weights", "cpu, float32", tmp_path)
    other = Run.open("study", Config(seed=4), "weights", "cpu, float32", tmp_path)
    assert one.path != other.path


def test_a_named_run_refuses_other_settings(tmp_path: Path):
    Run.open("study", Config(), "weights", "cpu, float32", tmp_path, "mine").part("piece").write_text("kept")
    refused(lambda: Run.open("study", Config(seed=4), "weights", "cpu, float32", tmp_path, "mine"), "other settings")


def test_an_unfinished_run_refuses_to_go_on_with_other_weights(tmp_path: Path):
    Run.open("study", Config(), MODEL, "cpu, float32", tmp_path).part("piece").write_text("kept")
    refused(
        lambda: Run.open("study", Config(), "0" * 16 + "-1-0", "cpu, float32", tmp_path),
        "begun with another model (it differs in config or modules)",
    )


def test_an_unfinished_run_refuses_to_go_on_with_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run.open("study", Config(), MODEL, "cpu, float32", tmp_path)
    run.part("piece").write_text("kept")
    monkeypatch.setattr("kvprobe.environment._commit", lambda: "another")
    refused(lambda: Run.open("study", Config(), MODEL, "cpu, float32", tmp_path), "begun with another commit (")
    run.finish({})
    assert Run.open("study", Config(), MODEL, "cpu, float32", tmp_path).finished


def test_edits_of_the_code_show_in_the_commit(tmp_path: Path):
    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    assert _commit(tmp_path) is None
    here = tmp_path / "kvprobe"
    here.mkdir()
    (here / "é.py").write_text("one")
    (tmp_path / "notes").write_text("one")
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    clean = _commit(here)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "notes").write_text("two")
    assert _commit(here) == clean
    seen = {clean}
    for number, content in enumerate(("two", "one two", None), 2):
        (here / "é.py").unlink() if content is None else (here / "é.py").write_text(content)
        edited = _commit(here) or ""
        assert edited.startswith(f"{clean}+edited:")
        assert short_commit(edited) == f"{clean[:12]}+edited"
        seen.add(edited)
        assert len(seen) == number
    (here / "é.py").write_text("one")
    assert _commit(here) == clean
    assert short_commit(clean) == clean[:12]


def test_a_run_refuses_to_go_on_when_what_its_settings_name_holds_something_else(tmp_path: Path):
    run = Run.open("study", Config(), MODEL, "cpu, float32", tmp_path, inputs={"tasks": "one"})
    run.part("piece").write_text("kept")
    refused(
        lambda: Run.open("study", Config(), MODEL, "cpu, float32", tmp_path, inputs={"tasks": "two"}),
        "its tasks held something else",
    )
    run.finish({})
    refused(
        lambda: Run.open("study", Config(), MODEL, "cpu, float32", tmp_path, inputs={"tasks": "two"}),
        "its tasks held something else",
    )


def test_a_run_of_an_older_format_is_neither_resumed_nor_shown_for_a_new_one(tmp_path: Path):
    run = Run.open("study", Config(), MODEL, "cpu, float32", tmp_path)
    run.part("piece").write_text("kept")
    run.finish({"accuracy": 0.5})
    environment = run.environment
    del environment["format"], environment["inputs"]
    (run.path / "env.json").write_text(json.dumps(environment))
    refused(lambda: Run.open("study", Config(), MODEL, "cpu, float32", tmp_path), "another version of kvprobe")
    assert Run.load(run.path).metrics == {"accuracy": 0.5}


@pytest.mark.parametrize("other", [{"config": Config(seed=4)}, {"model": "1-1-1"}, {"study": "another"}], ids=str)
def test_a_start_that_failed_leaves_a_directory_for_the_corrected_command(tmp_path: Path, other: dict[str, Any]):
    wrong: dict[str, Any] = {"study": "study", "config": Config(), "model": MODEL, "device": "cpu"}
    left = Run.open(**wrong, root=tmp_path, name="mine")
    left.part("first.partial").write_text("half a table")
    run = Run.open(**wrong | other, root=tmp_path, name="mine")
    assert run.config["settings"]["seed"] == (wrong | other)["config"].seed
    assert run.environment["model"] == (wrong | other)["model"]


def test_a_start_without_space_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as full:
        full.setattr("kvprobe.experiments.runs.yaml.safe_dump", no_space)
        refused(
            lambda: Run.open("study", Config(), MODEL, "cpu", tmp_path, "mine"), "the disk is full; free some space"
        )
    assert not list(tmp_path.iterdir())
    assert Run.open("study", Config(seed=4), MODEL, "cpu", tmp_path, "mine").config["settings"]["seed"] == 4


def no_space(*_: object, **__: object) -> str:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_command_whose_run_was_begun_anew_by_another_keeps_nothing_in_it(tmp_path: Path):
    first = Run.open("study", Config(), MODEL, "cpu", tmp_path, "mine")
    second = Run.open("study", Config(seed=4), MODEL, "cpu", tmp_path, "mine")
    refused(
        lambda: first.write_part("piece", lambda path: path.write_text("of the first")), "begun anew by another command"
    )
    assert second.write_part("piece", lambda path: path.write_text("of the second")).read_text() == "of the second"


@pytest.mark.parametrize("name", ["../../x", "..", ".", "", "a/b", "/tmp/x", ".hidden", "x" * 101, "a\nb"])
def test_a_name_that_is_no_folder_of_its_own_is_refused(tmp_path: Path, name: str):
    refused(lambda: Run.open("study", Config(), MODEL, "cpu", tmp_path / "runs", name), "cannot be the name of a run")
    assert not list(tmp_path.iterdir())


def as_given(model: Model, config: Settings, case: int, content: Any) -> Any:
    return content


def never(model: Model, config: Settings, case: int) -> Any:
    pytest.fail("a part that is there is measured again")


@pytest.mark.parametrize("cut", [0, 10, -1, -40])
def test_a_damaged_part_is_named_with_what_to_do(tmp_path: Path, cut: int):
    run = Run.open("study", Config(), MODEL, "cpu", tmp_path)
    bar: Any = {"doing": "Measuring", "unit": "case"}
    parts = Parts(any_model(), Config(), run)
    for kind, write, content in (
        ("parquet", parts.table, pd.DataFrame({"a": range(9)})),
        ("safetensors", parts.tensors, {"a": torch.arange(9)}),
    ):
        write(as_given, [0], "a", content, **bar)
        write(never, [0], "a", **bar)
        path = run.part(f"00000-a.{kind}")
        path.write_bytes(path.read_bytes()[:cut])
        refused(
            lambda write=write: write(never, [0], "a", **bar),
            f"{path.name} is damaged",
            "delete this file, and start the run again",
        )


def interrupted(model: Model, config: Settings, case: str, measured: list[str]) -> list[dict[str, str]]:
    measured.append(case)
    if measured == ["a", "b"]:
        raise KeyboardInterrupt
    return [{"case": case}]


def test_parts_are_written_once_in_the_order_of_the_cases(tmp_path: Path):
    run, measured = Run.open("study", Config(), MODEL, "cpu", tmp_path), []

    def table() -> pd.DataFrame:
        parts = Parts(any_model(), Config(), run)
        return parts.table(interrupted, ["a", "b", "c"], "cases", measured, doing="Measuring", unit="case")

    with pytest.raises(KeyboardInterrupt):
        table()
    assert list(table()["case"]) == ["a", "b", "c"]
    assert measured == ["a", "b", "b", "c"]


def test_a_page_is_not_written_through_a_link(tmp_path: Path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "report.html.partial").symlink_to(mine)
    write_whole(tmp_path / "report.html", "a page")
    assert (mine.read_text(), (tmp_path / "report.html").read_text()) == ("precious", "a page")


def test_a_foreign_folder_is_not_taken_over(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    refused(lambda: Run.open("study", Config(), "weights", "cpu, float32", tmp_path, "mine"), "not a run")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"


def test_finishing_writes_results_and_drops_intermediate_ones(tmp_path: Path):
    run = Run.open("study", Config(), "weights", "cpu, float32", tmp_path)
    run.part("piece").write_text("kept")
    assert not run.finished
    run.save_table("samples", pd.DataFrame({"sample": [0, 1]}))
    run.finish({"accuracy": 0.5})
    loaded = Run.load(run.path)
    assert loaded.finished
    assert loaded.metrics == {"accuracy": 0.5}
    assert list(loaded.df()["sample"]) == [0, 1]
    assert not (run.path / "parts").exists()
    assert loaded.config == {"study": "study", "settings": as_mapping(Config())}
    assert from_mapping(Config, loaded.config["settings"]) == Config()


def test_the_environment_says_what_it_ran_on(tmp_path: Path):
    environment = Run.open("study", Config(), "weights", "cpu, float32", tmp_path).environment
    assert environment["seed"] == 0
    assert environment["model"] == "weights"
    assert environment["versions"]["torch"]
    assert json.dumps(environment)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    refused(lambda: Run.load(tmp_path), "not a run directory")


def test_an_unfinished_run_has_no_tables(tmp_path: Path):
    run = Run.open("study", Config(), "weights", "cpu, float32", tmp_path)
    refused(run.df, "unfinished")
    refused(lambda: run.metrics, "unfinished")


def ones(model: Model, config: Settings, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(shape)}


def test_tensors_of_parts_are_joined_and_those_of_another_study_refused(tmp_path: Path):
    run = Run.open("study", Config(), MODEL, "cpu, float32", tmp_path)

    def paths(name: str, *shapes: tuple[int, ...]) -> list[Path]:
        parts = Parts(any_model(), Config(), run)
        return parts.tensors(ones, shapes, name, doing="Writing", unit="part")

    rows, others = paths("rows", (2, 3), (1, 3)), paths("others", (2, 3), (2, 4))
    assert tensor_of_parts(rows, "x").shape == (3, 3)
    assert tensor_of_parts(rows[:1] * 2, "x", stacked=True).shape == (2, 2, 3)
    refused(lambda: tensor_of_parts(rows, "x", stacked=True), "has 'x' of shape [1, 3], others [2, 3]")
    refused(lambda: tensor_of_parts(others, "x"), "has 'x' of shape [2, 4], others [2, 3]")
    refused(lambda: tensor_of_parts(rows, "y"), "has no 'y'; the part is not of this study")
    refused(lambda: text_of_part(rows[0], "texts"), "has no 'texts'")
