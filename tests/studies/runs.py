"""What the tests of all studies share: runs on a model in hand, runs that stop midway, and made-up material."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.experiments import running
from kvprobe.experiments.page import answer, write_page
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Study
from kvprobe.inference.model import Model
from kvprobe.inference.trials import Case
from kvprobe.tasks.facts import Fact
from kvprobe.tasks.passcode import Context


def give(patch: pytest.MonkeyPatch, model: Model) -> None:
    """Let a study that loads any model get this one."""
    patch.setattr(running, "load", lambda *_, **__: model)


def in_steps(run: Callable[[], Run]) -> Run:
    """What a run gives that is interrupted after the first part of each of its stages and started again.

    No part is written twice.
    """
    written: Counter[str] = Counter()
    stages: set[str] = set()
    whole = Run.write_part

    def stopping(self: Run, name: str, write: Callable[[Path], object]) -> Path:
        new, stage = not self.part(name).is_file(), name.partition("-")[2]
        path = whole(self, name, write)
        written[name] += new
        if stage in stages:
            return path
        stages.add(stage)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "write_part", stopping)
        while True:
            with suppress(KeyboardInterrupt):
                finished = run()
                assert stages
                assert set(written.values()) == {1}
                return finished


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


def every(**levels: Any) -> pd.DataFrame:
    """A row for each combination of these."""
    return pd.MultiIndex.from_product(list(levels.values()), names=list(levels)).to_frame(index=False)


def made_up_answers(
    task: str,
    samples: int,
    cases: Callable[[int], Iterable[Case]],
    right: Callable[[int], bool],
    became: Callable[[dict[str, Any], int], dict[str, Any]],
) -> pd.DataFrame:
    """A table as `kvprobe.inference.trials.answer` gives it.

    Args:
        cases: of an item, by its number.
        right: whether an item is answered rightly with a sound cache.
        became: what is otherwise in a case, by its labels and the item's number.
    """
    sound = {"broken": "", "kl": 0.0, "same": True, "diverged": -1, "struck": 1, "text": " 531."}
    rows: list[dict[str, Any]] = []
    for item in range(samples):
        known = {"task": task, "sample": item, "item": f"item-{item}", "slots": 101, "answer": "531"}
        row = known | sound | {"right": right(item)}
        rows.append(row | {"case": -1, "struck": 0})
        for number, labels in enumerate(dict(case.labels) for case in cases(item)):
            rows.append(row | labels | {"case": number} | became(labels, item))
    return pd.DataFrame(rows)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    """The two are equal but for rounding."""
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5 * float(other.abs().max()))


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
