"""Runs of conclusions in hand: pages for which nothing was measured."""

from pathlib import Path
from typing import Any

from kvprobe.experiments import running
from kvprobe.experiments.page import answer, write_page
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Study


class Shown(Run):
    """A finished run that was made of a conclusion in hand."""

    def read(self, file: str) -> str:
        return (self.path / file).read_text()


def page_of(study: Study[Any], config: Settings, conclusion: Conclusion, folder: Path, *, drawn: bool = False) -> Shown:
    """A run with this conclusion and its page, and perhaps its figures, for which nothing was measured."""
    run = Run.open(study.name, config, "made up", "cpu", folder / "shown")
    if drawn:
        running.draw(study, conclusion.findings, "made up", run.path / "figures")
    run.finish(conclusion.record())
    write_page(study, run)
    return Shown(run.path)


def answer_of(study: Study[Any], config: Settings, conclusion: Conclusion, folder: Path) -> str:
    """The answer of the page of such a run, in one line."""
    run = Run.open(study.name, config, "made up", "cpu", folder / "shown")
    run.finish(conclusion.record())
    return " ".join(answer(study, run).split())
