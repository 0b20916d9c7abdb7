"""Items worked on in forked processes: what they share, and what becomes of errors, kills and bars."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from kvprobe import processes
from kvprobe.errors import UserError
from kvprobe.processes import check_processes, forked, peak_bytes
from kvprobe.progress import Bar
from tests.refusals import refused

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(processes, "_peak", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_items_are_done_in_other_processes_with_their_share_of_the_threads(tmp_path: Path):
    weights = torch.arange(4.0)

    def work(item: int) -> None:
        (tmp_path / str(item)).write_text(f"{os.getpid()} {torch.get_num_threads()} {float(weights.sum()) * item}")

    assert len(list(forked(work, range(5), 2))) == 5
    done = [(tmp_path / str(item)).read_text().split() for item in range(5)]
    assert str(os.getpid()) not in {process for process, _, _ in done}
    assert len({process for process, _, _ in done}) <= 2
    assert [(threads, float(said)) for _, threads, said in done] == [("1", 6.0 * item) for item in range(5)]
    assert torch.get_num_threads() == 2


def test_processes_of_several_threads_each_do_not_wait_for_those_of_the_process_that_forked_them():
    torch.set_num_threads(4)
    numbers = torch.ones(2**18)

    def give_up(*_: object) -> None:
        raise TimeoutError

    def work(item: int) -> None:
        assert torch.get_num_threads() == 2
        numbers.exp()

    numbers.exp()
    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        assert len(list(forked(work, range(2), 2))) == 2
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("items", "at_once"), [(5, 1), (1, 2), (0, 2)])
def test_one_process_or_item_needs_no_fork(items: int, at_once: int):
    done = []
    assert len(list(forked(done.append, range(items), at_once))) == len(done) == items


@pytest.fixture
def none_left() -> Iterator[None]:
    """No process is left that was not there before."""
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


@pytest.mark.usefixtures("none_left")
def test_an_error_is_raised_here_and_others_are_given_up(tmp_path: Path):
    def work(item: int) -> None:
        if item == 1:
            raise UserError("the second is wrong.")
        time.sleep(4)
        (tmp_path / str(item)).touch()

    refused(lambda: list(forked(work, range(4), 2)), "the second is wrong.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("none_left")
def test_an_interruption_ends_those_that_are_at_work(tmp_path: Path):
    def work(item: int) -> None:
        time.sleep(4 * item)
        (tmp_path / str(item)).touch()

    steps = forked(work, range(3), 2)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_process_that_is_killed_is_no_hang():
    def work(item: int) -> None:
        if item:
            os.kill(os.getpid(), signal.SIGKILL)

    refused(lambda: list(forked(work, range(3), 2)), "was killed", "--processes 1")


@pytest.mark.usefixtures("none_left")
def test_a_process_that_is_stopped_is_no_hang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.05)

    def work(item: int) -> None:
        if item:
            os.kill(os.getpid(), signal.SIGSTOP)

    refused(lambda: list(forked(work, range(3), 2)), "was stopped by a signal", "start it again, and it resumes")


def test_a_process_ends_with_the_one_that_forked_it(tmp_path: Path):
    if not (run := os.fork()):
        list(forked(lambda item: (tmp_path / str(os.getpid())).touch() or time.sleep(60), range(2), 2))
    while len(forked_by := list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    psutil.wait_procs([psutil.Process(int(child.name)) for child in forked_by if psutil.pid_exists(int(child.name))], 5)
    assert not any(psutil.pid_exists(int(child.name)) for child in forked_by)


def test_bars_of_forked_processes_are_not_shown(capfd: pytest.CaptureFixture[str]):
    list(forked(lambda item: list(Bar(range(3), desc=f"Bar {item}")), range(2), 2))
    assert capfd.readouterr().err == ""


def test_memory_of_all_processes_counts():
    held, before = psutil.Process().memory_info().rss, peak_bytes()

    def work(_: int) -> None:
        torch.ones(2**27)  # half a GiB

    list(forked(work, range(2), 2))
    together = held + 2 * 2**29
    assert max(before, together - 2**27) <= peak_bytes() <= max(before, together + 2**28)


def test_several_processes_are_refused_where_none_can_be_forked(monkeypatch: pytest.MonkeyPatch):
    check_processes(1, torch.device("cuda"))
    check_processes(64, CPU)
    refused(lambda: check_processes(0, CPU), "0 processes", "from 1")
    refused(lambda: check_processes(2, torch.device("cuda")), "2 processes", "cuda", "ask for 1")
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    refused(lambda: check_processes(2, CPU), "2 processes cannot share a model on darwin and cpu", "ask for 1")
