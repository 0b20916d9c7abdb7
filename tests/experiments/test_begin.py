"""How studies begin and resume: a run goes on only with the model, tokenizer and files that it was begun with."""

import copy
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvprobe.errors import UserError
from kvprobe.experiments import running
from kvprobe.experiments.running import begin
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model, load
from kvprobe.studies import find
from kvprobe.studies.bitflips import Config
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.jsonl import JSONLines
from kvprobe.tasks.task import items_digest
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused

LINES = [
    '{"prompt": "the old mill", "answer": "a"}',
    '{"prompt": "the shed", "answer": "b"}',
    '{"prompt": "x", "answer": "c"}',
]


def opened(model: Model, root: Path, monkeypatch: pytest.MonkeyPatch, tasks: str = "one") -> Run:
    monkeypatch.setattr(running, "load", lambda *_, **__: model)
    with begin("bitflips", Config(samples=2), root, None, {"tasks": tasks}) as (_, run):
        return run


def other_theta() -> Model:
    plain = llama().lanes.plain
    plain.config.rope_parameters = {"rope_type": "default", "rope_theta": 50_000.0}
    return load(plain, tokenizer=tiny_tokenizer())


def other_tokenizer() -> Model:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["zzz"])
    return llama(tokenizer=tokenizer)


def other_template() -> Model:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    return llama(tokenizer=tokenizer)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: llama(seed=1, tokenizer=tiny_tokenizer()), "weights"),
        (other_theta, "config or modules"),
        (other_tokenizer, "tokenizer or chat template"),
        (other_template, "tokenizer or chat template"),
    ],
)
def test_a_run_is_neither_resumed_nor_shown_for_another_model(
    other: Any, said: str, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = llama(tokenizer=tiny_tokenizer())
    run = opened(model, tmp_path, monkeypatch)
    run.write_part("00000-answers.parquet", lambda path: path.write_text("begun"))
    if finished:
        run.save_table("samples", pd.DataFrame({"a": [1]}))
        run.finish({})
    again = load(copy.deepcopy(model.lanes.plain), tokenizer=tiny_tokenizer())
    assert opened(again, tmp_path, monkeypatch).path == run.path
    refused(lambda: opened(other(), tmp_path, monkeypatch), re.compile(f"another model \\(it differs in {said}\\)"))
    refused(lambda: opened(model, tmp_path, monkeypatch, tasks="two"), "its tasks held something else")


def test_the_digest_of_tasks_is_of_what_is_read_of_them(tmp_path: Path):
    path = tmp_path / "mine.jsonl"

    def written(lines: list[str], count: int = 2) -> str:
        path.write_text("\n".join(lines))
        return items_digest([JSONLines(path)], count, 0)

    first = written(LINES)
    assert written([*LINES, ""]) == first
    assert (
        len({first, written(LINES[::-1]), written(LINES, 3), written([LINES[0], LINES[1].replace("b", "d"), LINES[2]])})
        == 4
    )
    shipped = [find_task("recite"), find_task("retrieve")]
    assert items_digest(shipped, 3, 0) == items_digest(shipped, 3, 0) != items_digest(shipped, 3, 1)


@pytest.mark.parametrize("study", ["bitflips", "bands", "robustness"])
def test_studies_of_tasks_tie_their_runs_to_what_the_files_hold(
    study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry, path = find(study), tmp_path / "mine.jsonl"
    config = entry.config(tasks=(str(path),), samples=2)
    seen: list[dict[str, str]] = []

    def stop(*given: Any) -> None:
        seen.append(given[4])
        raise UserError("Far enough.")

    monkeypatch.setattr(running, "begin", stop)
    for lines in (LINES, LINES[::-1]):
        path.write_text("\n".join(lines))
        refused(lambda: entry.run(config, tmp_path), "Far enough.")
    assert seen[0].keys() == {"tasks"}
    assert seen[0] != seen[1]
    path.write_text(LINES[0])
    refused(lambda: entry.run(config, tmp_path), "there are 1")
