"""What the tests of all studies share: runs on a model in hand, runs that stop midway, and made-up material."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

import kvprobe.experiments.begin as beginning
from kvprobe.experiments import running
from kvprobe.experiments.page import write_page
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.inference.model import Model
from kvprobe.tasks.facts import Fact
from kvprobe.tasks.passcode import Context

Result = TypeVar("Result")


def give(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Let a study that loads any model get this one."""
    patch.setattr(beginning, "load", lambda *_, **__: model)


def run_on(model: Model, study: ModuleType, config: Settings, root: Path) -> Run:
    """A study's run on a model in hand."""
    with pytest.MonkeyPatch.context() as patch:
        give(patch, model)
        return study.run(config, root)


def interrupted(
    run: Callable[[], Result],
    patch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    at: int,
    instead: Callable[..., Any] | None = None,
) -> tuple[Result, list[tuple[Any, ...]]]:
    """What a run gives that was interrupted at one call of this function and then started again.

    Args:
        at: which call is interrupted, counted from 1.
        instead: what the other calls give, where measuring again would take long.

    Returns:
        What the second start gives, and the arguments of all calls.
    """
    calls: list[tuple[Any, ...]] = []
    function = instead or getattr(module, name)

    def stopping(*arguments: Any, **settings: Any) -> Any:
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return function(*arguments, **settings)

    patch.setattr(module, name, stopping)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(calls) == at
    return run(), calls


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


def assert_figures(run: Run, *names: str) -> None:
    """These figures were drawn, both as pixels and as vectors."""
    for name in names:
        assert (run.path / "figures" / f"{name}.png").stat().st_size > 5_000
        assert (run.path / "figures" / f"{name}.svg").is_file()


def made_up_fact(number: int, kind: str = "code", values: tuple[str, str] = ("b", "d"), padding: int = 0) -> Fact:
    """A fact in the words of the tiny tokenizer."""
    return Fact(
        id=f"{kind}-{number}",
        kind=kind,
        system="be kind",
        chat_user="a day" + " so" * padding,
        chat_assistant="it is",
        fact_user=f"the {kind} is {{fact}} so",
        fact_assistant="well",
        later_user="and the sea?",
        later_assistant="it is cold",
        question=f"what is the {kind}?",
        lead="it is",
        values=values,
    )


FOUR_FACTS = tuple(made_up_fact(number, padding=number) for number in range(4))
"""Facts of different lengths."""


def short_contexts(count: int, longer: str = "") -> tuple[Context, ...]:
    """Short conversations, of which each has its code this much later: those that ship run to a thousand tokens under
    the tiny tokenizer."""
    return tuple(
        Context(
            id=f"short-{number}",
            system="Be kind.",
            chat_user=f"the ride {number}",
            chat_assistant="Ah.",
            ask_summary_1="Sum?",
            summary_1=f"a ride {number}.",
            secret_user=f"{longer * number}the code is {{code}}.",
            secret_assistant="Ta.",
            ask_summary_2="And then?",
            summary_2="the code was told.",
            question="the code?",
            answer="It is",
        )
        for number in range(count)
    )


def gsm8k_questions(folder: Path, count: int) -> Path:
    """A file in the shape of GSM8K."""
    path = folder / "questions.jsonl"
    lines = [
        {
            "question": f"Ann has {n} books and buys {n + 3}. How many are there?",
            "answer": f"{n}+{n + 3}\n#### {2 * n + 3}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
