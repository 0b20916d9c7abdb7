"""How far a run is, as its files say; and runs of which two machines measured a share each."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.cli.runs import merge as merge_command
from kvprobe.cli.runs import status as status_command
from kvprobe.experiments import stages
from kvprobe.experiments.merging import merge
from kvprobe.experiments.parts import Parts, tensor_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.status import status, statuses
from kvprobe.files import claimed_by, folder_claimed
from kvprobe.inference.model import Model
from tests.models import any_model
from tests.refusals import refused

MODEL = "0" * 16 + "-0-0"
CONFIG = Settings(seed=4)


def fragile(model: Model, config: Settings, number: int, wrong: int) -> Iterator[dict[str, int]]:
    if number == wrong:
        raise ValueError("There is no such number.\nNowhere.")
    yield {"number": number, "seed": config.seed}


def doubled(model: Model, config: Settings, number: int, rows: pd.DataFrame) -> dict[str, torch.Tensor]:
    return {"twice": torch.tensor([2 * rows["number"][number], torch.nan])}


def opened(root: Path, share: tuple[int, int] = (1, 1), **other: Any) -> Run:
    asked = {"study": "study", "config": CONFIG, "model": MODEL, "device": "cpu, float32"} | other
    return Run(Run.open(**asked, root=root, name="mine").path, share=share)


def both_stages(run: Run, wrong: int = -1) -> torch.Tensor:
    parts = Parts(any_model(), CONFIG, run)
    rows = parts.table(fragile, range(5), "numbers", wrong, doing="Counting", unit="number")
    paths = parts.tensors(doubled, range(5), "doubles", rows, doing="Doubling", unit="number")
    return tensor_of_parts(paths, "twice", stacked=True)[:, 0]


def test_a_run_says_how_far_it_is_and_which_case_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = opened(tmp_path)
    with pytest.raises(ValueError, match="no such number"):
        both_stages(run, wrong=3)
    (begun,) = stages.begun_stages(run.path / "parts")
    for place in range(3):  # a part every ten seconds
        when = begun.attempts[0].began + 10 * (place + 1)
        os.utime(run.part(f"0000{place}-numbers.parquet"), (when, when))
    found = status(run.path)
    (stage,) = found.stages
    assert (stage.done, stage.total, stage.failed) == (3, 5, {3: "There is no such number. Nowhere"})
    assert stage.left == pytest.approx(20)
    assert (found.state, found.held_by, found.left, found.last) == ("failed", None, None, stage.last)
    with folder_claimed(run.path):
        found = status(run.path)
        assert (found.state, found.held_by) == ("at work", claimed_by(run.path))
        assert f"process {os.getpid()} on " in str(found.held_by)
    status_command(run.path)
    shown = capsys.readouterr().out
    assert "study, failed (last written" in shown
    assert "Counting: 3 of 5 × number, 1 failed\n    case 3 failed: There is no such number. Nowhere\n" in shown
    assert "about 20 s more of this stage, how long the rest takes was not measured" in shown
    status_command(run.path, json=True)
    record = json.loads(capsys.readouterr().out)
    assert (record["settings"]["seed"], record["stages"][0]["failed"]) == (4, {"3": stage.failed[3]})
    both_stages(run)
    assert [(stage.done, stage.failed) for stage in status(run.path).stages] == [(5, {}), (5, {})]
    run.finish({})
    assert (status(run.path).state, status(run.path).stages) == ("finished", [])
    opened(tmp_path / "deeper")
    status_command(tmp_path)
    assert capsys.readouterr().out.startswith(f"{run.path}  study: finished (last written ")
    refused(lambda: statuses(run.path), "There is no run in", "or one that holds runs")


def test_a_run_that_failed_at_its_first_case_is_begun_anew_with_other_settings(tmp_path: Path):
    with pytest.raises(ValueError, match="no such number"):
        both_stages(opened(tmp_path), wrong=0)
    assert opened(tmp_path, config=Settings(seed=5)).config["settings"]["seed"] == 5


@pytest.mark.parametrize("out", [None, "both"])
def test_shares_of_two_machines_are_one_run_without_measuring_again(
    out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    here, there = (opened(tmp_path / str(number), (number, 2)) for number in (1, 2))
    refused(lambda: both_stages(here), "Share 1/2 of the stage 'numbers' is measured, 3 of 5 cases", "kvprobe merge")
    refused(lambda: both_stages(there), "Share 2/2", "2 of 5 cases")
    merge_command(here.path, there.path, out=out and tmp_path / out)
    place = tmp_path / out if out else here.path
    assert f"--out {place.parent} --name {place.name} goes on" in capsys.readouterr().out
    assert [(stage.done, stage.total) for stage in status(place).stages] == [(5, 5)]
    whole = both_stages(opened(tmp_path / "whole"))
    with monkeypatch.context() as patch:
        patch.setattr("tests.experiments.test_status.fragile.__code__", doubled.__code__)  # it would fail
        assert torch.equal(both_stages(Run(place)), whole)
    second = merge(place, tmp_path / "whole" / "mine")  # all cases in both
    assert torch.equal(both_stages(second), whole)


def test_what_is_not_one_run_is_not_merged_and_the_case_that_differs_is_named(tmp_path: Path):
    one, other = opened(tmp_path / "one"), opened(tmp_path / "other")
    for run in (one, other):
        both_stages(run)

    def joined(**changed: Any) -> None:
        merge(one.path, opened(tmp_path / "changed", **changed).path)

    refused(lambda: joined(config=Settings(seed=5)), "holds a run with other settings than", "not one run")
    refused(lambda: joined(model="0" * 16 + "-1-0"), "was begun with another model (it differs in config or modules)")
    refused(lambda: joined(device="cuda:0, bfloat16"), "was begun with another device (cpu, float32, now cuda:0")
    environment = json.loads((other.path / "env.json").read_text())
    (other.path / "env.json").write_text(json.dumps(environment | {"commit": "another"}))
    refused(lambda: merge(one.path, other.path), "was begun with another commit")
    (other.path / "env.json").write_text(json.dumps(environment))
    refused(lambda: merge(one.path, one.path), "are one run")
    refused(lambda: merge(one.path, other.path, tmp_path), "is not empty")
    with folder_claimed(other.path):
        refused(lambda: merge(one.path, other.path), "is in use by another command", f"(process {os.getpid()} on ")
    for part, case in (("00002-numbers.parquet", "case 2 of the stage 'numbers'"), ("00001-doubles.safetensors", "1")):
        same = other.part(part).read_bytes()
        wrong = one.part(part.replace("1-", "3-") if "doubles" in part else "00001-numbers.parquet")
        other.part(part).write_bytes(wrong.read_bytes())
        (missing := one.part("00000-numbers.parquet")).unlink()
        refused(lambda: merge(one.path, other.path), "both measured", case, "came out differently")
        assert not missing.exists()
        other.part(part).write_bytes(same)
        assert merge(one.path, other.path).part(missing.name).exists()
    other.part("00002-numbers.parquet").write_bytes(b"nothing")
    refused(lambda: merge(one.path, other.path), "00002-numbers.parquet is damaged")
    one.finish({})
    refused(lambda: merge(one.path, other.path), "is finished; only runs of which parts are left")
