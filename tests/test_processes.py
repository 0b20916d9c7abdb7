"""Items worked on in forked processes: what they share, and what becomes of errors, kills and bars."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from kvprobe import processes
from kvprobe.errors import UserError
from kvprobe.processes import forked, how_many, peak_bytes
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


@pytest.mark.parametrize(("items", "at_once"), [(5, 1), (1, 2), (0, 2)])
def test_one_process_or_item_needs_no_fork(items: int, at_once: int):
    done = []
    assert len(list(forked(done.append, range(items), at_once))) == len(done) == items


def test_an_error_is_raised_here_and_others_are_given_up():
    def work(item: int) -> None:
        if item == 1:
            raise UserError("the second is wrong.")
        time.sleep(60)

    began = time.monotonic()
    refused(lambda: list(forked(work, range(4), 2)), "the second is wrong.")
    assert time.monotonic() - began < 30
    assert psutil.Process().children() == []


def test_an_interruption_ends_those_that_are_at_work():
    steps = forked(lambda item: time.sleep(60 * item), range(3), 2)
    next(steps)
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert psutil.Process().children() == []


def test_a_process_that_is_killed_is_no_hang():
    def work(item: int) -> None:
        if item:
            os.kill(os.getpid(), signal.SIGKILL)

    refused(lambda: list(forked(work, range(3), 2)), "was killed", "--processes 1")


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


def test_as_many_as_threads_if_memory_allows_and_one_where_nothing_forks(monkeypatch: pytest.MonkeyPatch):
    def available(count: int) -> None:
        memory = SimpleNamespace(available=count * (psutil.Process().memory_info().rss + processes.SPARE + 2**25))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    available(100)
    assert (how_many(CPU), how_many(CPU, 3), how_many(torch.device("cuda"))) == (2, 3, 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert how_many(CPU) == processes.MOST
    available(3)
    assert how_many(CPU) == 3
    available(0)
    assert how_many(CPU) == 1
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    assert (how_many(CPU), how_many(CPU, 1)) == (1, 1)
    refused(lambda: how_many(CPU, 2), "2 processes cannot share a model on darwin and cpu", "ask for 1")
    refused(lambda: how_many(CPU, 0), "0 processes", "from 1")
