"""Two runs of the same study, settings, model and code, of which each measured some of the cases, as one."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from safetensors import safe_open

from kvprobe.errors import UserError
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import folder_with_run
from kvprobe.experiments.stages import FAILED, BegunStage, begun_stages, measured_parts, save_stages
from kvprobe.files import folder_claimed, read_table, refuse_damaged, replacing, told, write_whole


def merge(one: Path, other: Path, out: Path | None = None) -> Run:
    """Join the parts of two unfinished runs; the run then goes on with the cases that neither measured.

    Args:
        one: to which those of the `other` are added, if `out` is not given.
        out: a new folder for both.

    Raises:
        UserError: a folder holds no run, a finished one, or one that a process holds; the two differ in study,
            settings, model, versions, commit or device; a part is damaged; or a case that both measured came out
            differently, which is named. Then nothing is written.
    """
    folders = [folder_with_run(path) for path in (one, other)]
    if folders[0].resolve() == folders[1].resolve():
        raise UserError(f"{one} and {other} are one run; name two.")
    target = folders[0] if out is None else out
    with ExitStack() as claims:
        for folder in folders:
            claims.enter_context(folder_claimed(folder))
        first, second = (Run(folder) for folder in folders)
        for run in (first, second):
            if run.finished:
                raise UserError(f"{run.path} is finished; only runs of which parts are left can be merged.")
        if (difference := first.difference(second.config, second.environment)) is not None:
            raise UserError(f"{one} {difference} than {other}, so they are not one run; merge others.")
        stages = list(_stages(first, second))
        missing = list(_missing(first, second))
        if out is not None:
            if out.exists() and any(out.iterdir()):
                raise UserError(f"{out} is not empty; choose another --out.")
            (out / "figures").mkdir(parents=True)
            claims.enter_context(folder_claimed(out))
            for name in ("env.json", "config.yaml"):
                write_whole(out / name, (first.path / name).read_bytes())
            for part in _files(first):
                _copy(first, part, out)
        for part in missing:
            _copy(second, part, target)
        (target / "parts").mkdir(exist_ok=True)
        save_stages(target / "parts", stages)
    return Run.load(target)


def _files(run: Run) -> list[Path]:
    """The files of a run's parts, by their path below it."""
    held = measured_parts(run.path / "parts")
    files = (file for path in held for file in ([path] if path.is_file() else sorted(path.rglob("*"))))
    return [file.relative_to(run.path / "parts") for file in files if file.is_file()]


def _missing(first: Run, second: Run) -> Iterator[Path]:
    """Files of the second run that the first lacks; those that both have must hold the same."""
    for file in _files(second):
        one, other = (run.path / "parts" / file for run in (first, second))
        if other.suffix in (".parquet", ".safetensors"):
            refuse_damaged(other)
        if not one.is_file():
            yield file
        elif not _same(one, other):
            case, _, stage = file.stem.partition("-")
            what = f"case {int(case)} of the stage {stage!r}" if case.isdecimal() and stage else str(file)
            raise UserError(
                f"{first.path} and {second.path} both measured {what}, and it came out differently; see why, or delete "
                f"{file} in one of them."
            )


def _stages(first: Run, second: Run) -> Iterator[BegunStage]:
    """The stages that either run has begun."""
    both = [{stage.name: stage for stage in begun_stages(run.path / "parts")} for run in (first, second)]
    for name in dict.fromkeys(name for stages in both for name in stages):
        one, other = (stages.get(name, both[0].get(name, both[1].get(name))) for stages in both)
        assert one is not None
        assert other is not None
        if one.total != other.total:
            raise UserError(
                f"The stage {name!r} has {one.total} cases in {first.path} and {other.total} in {second.path}; the two "
                "are not of one kind."
            )
        yield replace(one, attempts=())  # other machines have another pace


def _same(one: Path, other: Path) -> bool:
    """Whether two parts hold the same numbers and texts."""
    if one.read_bytes() == other.read_bytes():
        return True
    if one.suffix == ".parquet":
        ours, theirs = read_table(one), read_table(other)
        try:
            pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
        except AssertionError:
            return False
        return True
    if one.suffix != ".safetensors":
        return False
    with safe_open(one, framework="pt") as ours, safe_open(other, framework="pt") as theirs:
        names = list(ours.keys())
        return (
            ours.metadata() == theirs.metadata()
            and names == list(theirs.keys())
            and all(_equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in names)
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.isnan(), other.isnan()) and bool(
        (one == other)[~one.isnan()].all()
    )  # fmt: skip


def _copy(run: Run, file: Path, to: Path) -> None:
    target = to / "parts" / file
    with told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as partial:
        shutil.copy2(run.path / "parts" / file, partial)
    target.with_name(target.name + FAILED).unlink(missing_ok=True)
