"""Faults of the world: a run that is killed, a disk that is full, a worker without memory, two commands at once."""

import os
import resource
import secrets
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from kvprobe.experiments import stages
from kvprobe.experiments.parts import Parts, tensor_of_parts
from kvprobe.experiments.running import begin
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.status import status
from kvprobe.files import refuse_damaged
from kvprobe.inference.model import Model
from kvprobe.processes import _end_threads
from kvprobe.progress import silence
from tests.models import any_model
from tests.refusals import refused

CASES = range(5)


def measure(model: Model, config: Settings, case: int) -> Iterator[dict[str, float]]:
    embedded = model.lanes.plain.get_input_embeddings().weight[case]
    yield {"case": case, "norm": float(embedded.norm()), "seed": config.seed}


def vectors(model: Model, config: Settings, case: int) -> dict[str, torch.Tensor]:
    return {"embedded": model.lanes.plain.get_input_embeddings().weight[case].detach().clone()}


def whole_run(root: Path, processes: int = 1, measured: Callable[..., Any] = measure) -> Run:
    """A run of two stages, from its claim to its end."""
    model = any_model()
    with begin("faults", Settings(), root, "mine", model=model) as (_, begun):
        run = Run(begun.path, begun.begun, processes)
        if not run.finished:
            parts = Parts(model, Settings(), run)
            run.save_table("samples", parts.table(measured, CASES, "rows", doing="Measuring", unit="case"))
            paths = parts.tensors(vectors, CASES, "vectors", doing="Reading", unit="case")
            run.save_table("vectors", pd.DataFrame(tensor_of_parts(paths, "embedded", stacked=True).numpy()))
            run.finish({})
    return run


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return whole_run(tmp_path_factory.mktemp("sound"))


def assert_same(run: Run, sound: Run) -> None:
    """Tables are those of a run to which nothing happened, and nothing else is left."""
    for table in ("samples", "vectors"):
        pd.testing.assert_frame_equal(run.df(table), sound.df(table), check_exact=True)
    assert {path.name for path in run.path.iterdir()} == {path.name for path in sound.path.iterdir()}


def forked(work: Callable[[], object]) -> int:
    """Do this in a process of its own. It draws no bars: all processes share the lock of these, and one that is killed
    while it holds the lock never gives it back."""
    _end_threads()
    if process := os.fork():
        return process
    silence()
    try:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("stage", ["rows", "vectors"])
def test_a_run_that_is_killed_while_it_writes_goes_on_without_loss_or_duplicates(
    processes: int, stage: str, tmp_path: Path, sound: Run, monkeypatch: pytest.MonkeyPatch
):
    whole, written = Run.write_part, Counter[str]()

    def dying(run: Run, name: str, write: Callable[[Path], object]) -> Path:
        with (tmp_path / "workers").open("a") as file:
            file.write(f"{os.getpid()}\n")

        def half(partial: Path) -> None:
            write(partial)
            if name.startswith(f"00002-{stage}"):
                os.kill(os.getpid() if processes == 1 else os.getppid(), signal.SIGKILL)
                signal.pause()

        return whole(run, name, half)

    def counting(run: Run, name: str, write: Callable[[Path], object]) -> Path:
        written[name] += 1
        return whole(run, name, write)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "write_part", dying)
        killed = forked(lambda: whole_run(tmp_path, processes))
        assert os.WTERMSIG(os.waitpid(killed, 0)[1]) == signal.SIGKILL
    workers = {int(process) for process in (tmp_path / "workers").read_text().split()}
    assert (killed in workers) == (processes == 1)
    left = [psutil.Process(process) for process in workers if psutil.pid_exists(process)]
    assert not psutil.wait_procs(left, 20)[1], "they outlive the run"
    there = {path.name for path in (tmp_path / "mine" / "parts").glob("[!.]*")}
    found = status(tmp_path / "mine")
    assert (found.state, found.present and found.present.name) == ("begun", stage)
    monkeypatch.setattr(Run, "write_part", counting)
    assert_same(whole_run(tmp_path), sound)
    assert (
        set(written)
        == {f"0000{case}-{kind}" for case in CASES for kind in ("rows.parquet", "vectors.safetensors")} - there
    )
    assert set(written.values()) == {1}


@contextmanager
def small_files() -> Iterator[None]:
    """No file may be larger than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("part", "reason"),
    [("00002-rows.parquet", "the disk is full"), ("00002-vectors.safetensors", "it would be larger than files may be")],
)
def test_a_file_for_which_there_is_no_room_is_named_and_no_half_of_it_is_left(
    processes: int, part: str, reason: str, tmp_path: Path, sound: Run, monkeypatch: pytest.MonkeyPatch
):
    """A table goes to the device that is always full; tensors, which replace a link, meet a limit of the system."""
    whole = Run.write_part

    def without_room(run: Run, name: str, write: Callable[[Path], object]) -> Path:
        if name != part:
            return whole(run, name, write)
        if "full" not in reason:
            with small_files():
                return whole(run, name, write)
        with pytest.MonkeyPatch.context() as patch:
            run.part(".full.partial").symlink_to("/dev/full")
            patch.setattr(secrets, "token_hex", lambda _: "full")
            return whole(run, name, write)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "write_part", without_room)
        refused(lambda: whole_run(tmp_path, processes), part, reason)
    parts = tmp_path / "mine" / "parts"
    left = stages.measured_parts(parts)  # beside what another process was writing when it was ended
    assert part not in {path.name for path in left}
    for path in left:
        refuse_damaged(path)
    present = status(tmp_path / "mine").present
    assert present is not None
    assert reason in present.failed[2]
    assert_same(whole_run(tmp_path), sound)


def starved(model: Model, config: Settings, case: int) -> Iterator[dict[str, float]]:
    """The third case is killed once, as the system kills what takes too much memory."""
    mark = Path(os.environ["KVPROBE_TEST_STARVED"])
    if case == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    yield from measure(model, config, case)


def test_a_worker_without_memory_costs_what_was_at_work_alone(
    tmp_path: Path, sound: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVPROBE_TEST_STARVED", str(tmp_path / "starved"))
    refused(lambda: whole_run(tmp_path, 2, starved), "was killed, probably because memory ran out", "and it resumes")
    assert status(tmp_path / "mine").stages[0].done >= 1
    assert_same(whole_run(tmp_path, 2, starved), sound)


def waiting(model: Model, config: Settings, case: int) -> Iterator[dict[str, float]]:
    """The second case waits until it may go on."""
    if case == 1:
        begun, goes_on = (int(pipe) for pipe in os.environ["KVPROBE_TEST_PIPES"].split())
        os.write(begun, b"x")
        os.read(goes_on, 1)
    yield from measure(model, config, case)


def test_a_second_process_on_a_run_is_refused_while_the_first_works(
    tmp_path: Path, sound: Run, monkeypatch: pytest.MonkeyPatch
):
    pipes: Sequence[int] = (*os.pipe(), *os.pipe())
    monkeypatch.setenv("KVPROBE_TEST_PIPES", f"{pipes[1]} {pipes[2]}")
    first = forked(lambda: whole_run(tmp_path, 1, waiting))
    os.read(pipes[0], 1)
    refused(lambda: whole_run(tmp_path), f"is in use by another command that is still running (process {first} on ")
    assert (status(tmp_path / "mine").state, status(tmp_path / "mine").stages[0].done) == ("at work", 1)
    os.write(pipes[3], b"x")
    assert os.waitpid(first, 0)[1] == 0
    assert_same(whole_run(tmp_path, 1, waiting), sound)
    for pipe in pipes:
        os.close(pipe)
