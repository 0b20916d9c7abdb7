"""Parts of a run that are worked on in several processes: the same files as in one, and only what is missing."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.work import forget_kept, kept
from kvprobe.inference.model import Model
from tests.models import any_model
from tests.refusals import refused


def square(model: Model, config: Settings, number: int) -> Iterator[dict[str, float]]:
    yield {"square": float(torch.tensor(number).square()), "process": os.getpid()}


def _squares(run: Run, alone: bool = False) -> pd.DataFrame:
    parts = Parts(any_model(), Settings(), run)
    return parts.table(square, range(1, 6), "squares", doing="Squaring", unit="number", alone=alone)


@pytest.mark.parametrize(("processes", "alone", "others"), [(1, False, False), (2, True, False), (2, False, True)])
def test_parts_are_the_same_in_any_number_of_processes(tmp_path: Path, processes: int, alone: bool, others: bool):
    table = _squares(Run(tmp_path, processes=processes), alone)
    assert list(table["square"]) == [1.0, 4.0, 9.0, 16.0, 25.0]
    assert (os.getpid() not in set(table["process"])) == others


def test_parts_that_are_there_stay_and_a_damaged_one_is_refused(tmp_path: Path):
    run = Run(tmp_path, processes=2)
    first = _squares(run)
    (tmp_path / "parts" / "00003-squares.parquet").unlink()
    (tmp_path / "parts" / "00001-squares.parquet").unlink()
    again = _squares(run)
    assert list(again["square"]) == list(first["square"])
    stayed = [0, 2, 4]
    assert list(again["process"][stayed]) == list(first["process"][stayed])
    assert set(again["process"][[1, 3]]).isdisjoint(first["process"])
    (tmp_path / "parts" / "00002-squares.parquet").write_bytes(b"nothing")
    refused(lambda: _squares(run), "00002-squares.parquet", "delete this file")


def test_a_stage_that_another_process_cannot_find_is_refused(tmp_path: Path):
    parts, found = Parts(any_model(), Settings(), Run(tmp_path)), []

    def inner(model: Model, config: Settings, number: int) -> Iterator[dict[str, float]]:
        found.append(number)
        return square(model, config, number)

    refusable: list[Any] = [inner, lambda *given: square(*given), partial(square, any_model())]
    for measure in refusable:
        refused(
            lambda measure=measure: parts.table(measure, [1], "squares", doing="Squaring", unit="number"),
            "The stage 'squares' is measured by", "define it at the top level",
        )  # fmt: skip
    assert not found


def test_what_cases_share_is_made_once_a_run():
    made: list[int] = []
    shared = kept(lambda number: made.append(number) or number)
    assert [shared(1), shared(1)] == [1, 1]
    forget_kept()
    assert [shared(1), *made] == [1, 1, 1]
