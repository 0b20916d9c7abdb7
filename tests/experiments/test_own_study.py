"""A study of the user's own: the file that `kvprobe new study` writes runs as it is, and what is wrong is said."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvprobe.experiments.page import answer, write_page, write_views
from kvprobe.experiments.running import run_study
from kvprobe.experiments.runs import Run
from kvprobe.experiments.skeleton import write_skeleton
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.studies import find, read_study
from tests.refusals import refused

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "studies.md"


@pytest.fixture(scope="module")
def hidden_thirds(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Model) -> tuple[Path, Run]:
    """The study's file, and a run of it."""
    folder = tmp_path_factory.mktemp("own")
    file = write_skeleton("hidden_thirds", folder)
    study = read_study(file)
    return file, run_study(study, study.config(prompts=8), folder, model=tiny_llama)


def test_the_file_is_the_one_that_the_page_shows_and_is_short(tmp_path: Path):
    text = write_skeleton("hidden_thirds", tmp_path).read_text()
    (shown,) = re.findall(r"```python\n(\"\"\".*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert shown == text
    assert len(text.splitlines()) < 60


def test_it_runs_and_its_page_shows_every_finding(hidden_thirds: tuple[Path, Run]):
    file, run = hidden_thirds
    study, findings = read_study(file), Conclusion.of(run.metrics).findings
    assert findings.values("kl", "third") == ["first", "second", "last"]
    assert findings.at("more").mean == pytest.approx(
        findings.at("kl", third="last").mean - findings.at("kl", third="first").mean
    )
    page = (run.path / "report.html").read_text()
    for finding in findings:
        assert study.write(finding) in page
    assert any(phrase in answer(study, run) for phrase in ("matters more", "is open"))
    assert "kvprobe run hidden_thirds.py --prompts 8" not in page  # the default
    assert "kvprobe run hidden_thirds.py" in page
    assert (run.path / "figures" / "kl.svg").is_file()
    assert write_page(study, Run.load(run.path)).read_text() == page
    refused(lambda: write_views(study, run), "has no views")


def test_a_model_in_hand_is_recorded_and_the_run_is_found_again(hidden_thirds: tuple[Path, Run], tiny_llama: Model):
    file, run = hidden_thirds
    assert run.config["settings"]["model"] == tiny_llama.name
    study = read_study(file)
    assert run_study(study, study.config(prompts=8), run.path.parent, model=tiny_llama).path == run.path


def rerun(file: Path, run: Run, model: Model, old: str, new: str) -> Run:
    """A run again, into the same directory, after the file was changed."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    os.utime(file, ns=(2, hash(new) % 10**9))
    study = read_study(file)
    return run_study(study, study.config(prompts=8), run.path.parent, model=model)


def test_changed_measuring_is_refused_and_a_changed_conclusion_is_drawn_again(tmp_path: Path, tiny_llama: Model):
    file = write_skeleton("changing", tmp_path)
    study = read_study(file)
    run = run_study(study, study.config(prompts=8), tmp_path, model=tiny_llama)
    again = rerun(file, run, tiny_llama, 'name="more"', 'name="more", keys={"of": "thirds"}')
    assert again.path == run.path
    assert Conclusion.of(again.metrics).findings.at("more", of="thirds").clusters == 8
    refused(
        lambda: rerun(file, run, tiny_llama, "size - start) * place // 3, start", "size - start) * place // 4, start"),
        "was begun when its code held something else",
    )


def test_changed_measuring_in_a_file_beside_is_refused(
    tmp_path: Path, tiny_llama: Model, monkeypatch: pytest.MonkeyPatch
):
    """Whether the helper is imported by the study or by another helper; what is imported from elsewhere counts not."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "aides").mkdir()
    for name, text in {"__init__": "", "first": "from . import second\n", "second": "LIMIT = 1\n"}.items():
        (tmp_path / "aides" / f"{name}.py").write_text(text)
    file = write_skeleton("helped", tmp_path)
    file.write_text(f"from aides.first import second as _\n{file.read_text()}")
    study = read_study(file)
    run = run_study(study, study.config(prompts=2), tmp_path, model=tiny_llama)
    (tmp_path / "aides" / "third.py").write_text("LIMIT = 2\n")
    assert run_study(study, study.config(prompts=2), tmp_path, model=tiny_llama).path == run.path
    (tmp_path / "aides" / "second.py").write_text("LIMIT = 2\n")
    refused(
        lambda: run_study(study, study.config(prompts=2), tmp_path, model=tiny_llama),
        "was begun when its code held something else",
    )


@pytest.mark.parametrize(("asked", "given"), [({}, 1), ({"processes": 2}, 2)])
def test_its_parts_are_worked_on_one_by_one_unless_it_is_asked_for(
    tmp_path: Path, tiny_llama: Model, asked: dict[str, int], given: int
):
    study, seen = read_study(write_skeleton("hidden_thirds", tmp_path)), list[int]()

    def collect(model: Any, config: Any, run: Run) -> pd.DataFrame:
        seen.append(run.processes)
        return study.collect(model, config, run)

    watched = replace(study, collect=collect)
    run_study(watched, study.config(prompts=2), tmp_path, model=tiny_llama, **asked)
    assert seen == [given]


def test_several_tables_are_kept_and_concluded_again_from_the_run(tmp_path: Path, tiny_llama: Model):
    given: list[dict[str, pd.DataFrame]] = []

    def conclude(rows: dict[str, pd.DataFrame], *_: Any) -> Conclusion:
        given.append(rows)
        return study.conclude(rows["samples"], *_)

    study = read_study(write_skeleton("several", tmp_path))
    tables = replace(
        study,
        collect=lambda *given: {"samples": study.collect(*given), "others": pd.DataFrame({"x": [1]})},
        conclude=conclude,
    )
    first, again = (run_study(tables, study.config(prompts=2), tmp_path, model=tiny_llama) for _ in range(2))
    assert first.df("others")["x"].tolist() == [1]
    assert again.metrics == first.metrics
    pd.testing.assert_frame_equal(given[0]["samples"], given[1]["samples"])
    assert set(given[1]) == {"samples", "others"}


def test_a_figure_of_an_earlier_conclusion_does_not_stay(tmp_path: Path, tiny_llama: Model):
    study = read_study(write_skeleton("renamed", tmp_path))
    (figure,) = study.figures
    run = run_study(study, study.config(prompts=2), tmp_path, model=tiny_llama)
    drawn = [run.path / "figures" / f"kl.{ending}" for ending in ("png", "svg")]
    assert all(path.is_file() for path in drawn)
    without = replace(study, figures=[replace(figure, finding="nothing")])
    assert run_study(without, study.config(prompts=2), tmp_path, model=tiny_llama).path == run.path
    assert not any(path.is_file() for path in drawn)


def test_an_only_table_by_name_and_no_prompt_are_refused(tmp_path: Path, tiny_llama: Model):
    study = read_study(write_skeleton("only", tmp_path))
    named = replace(study, collect=lambda *given: {"samples": study.collect(*given)})
    refused(lambda: run_study(named, study.config(prompts=2), tmp_path, model=tiny_llama), "let it return the table")
    refused(lambda: run_study(study, study.config(prompts=0), tmp_path, model=tiny_llama), "There is no prompt to")


def test_what_a_page_defines_before_its_blocks_is_in_its_answer(hidden_thirds: tuple[Path, Run], tmp_path: Path):
    file, run = hidden_thirds
    (tmp_path / "page.html.j2").write_text(
        '{% extends "study.html.j2" %}{% macro said() %}said so{% endmacro %}'
        "{% block answer %}{{ said() }}{% endblock %}"
    )
    assert answer(replace(read_study(file), folder=tmp_path), run) == "said so"


def test_what_may_not_be_claimed_is_refused(hidden_thirds: tuple[Path, Run]):
    file, run = hidden_thirds
    study, findings = read_study(file), Conclusion.of(run.metrics).findings
    refused(lambda: study.claim(findings, "kl", third="first"), "Nothing may be claimed of 'kl'")
    refused(lambda: study.claim(findings, "less"), "no finding called 'less'")


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path):
    file = write_skeleton("mine", tmp_path)
    first = read_study(file)
    assert read_study(file) is first
    file.write_text(file.read_text().replace("Hidden thirds", "Other thirds"))
    os.utime(file, ns=(1, 1))
    assert read_study(file).title == "Other thirds"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1", "declares no study; it must set STUDY"),
        ("STUDY = 1", "declares no study"),
        ("import nothing_of_this_name as STUDY", "cannot be imported: ModuleNotFoundError: No module named"),
        ("raise KeyboardInterrupt", "declares no study"),  # its code is not run
        ("raise SystemExit\nSTUDY = 1", "cannot be imported: SystemExit"),
        ("def", "cannot be imported: SyntaxError"),
        ("\0", "cannot be imported"),
    ],
)
def test_a_file_that_is_no_study_is_refused(code: str, words: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(code)
    refused(lambda: find(str(tmp_path / "mine.py")), words)


def test_a_file_that_is_not_there_is_refused_and_none_is_written_over(tmp_path: Path):
    refused(lambda: find(str(tmp_path / "none.py")), "There is no Python file", "kvprobe new study")
    write_skeleton("mine", tmp_path)
    refused(lambda: write_skeleton("mine", tmp_path), "exists; choose another name")
    refused(lambda: write_skeleton("../mine", tmp_path), "cannot name a study; use letters")
