"""Processes that share one model: items are worked on side by side, each with its share of torch's threads.

They are forked, so they share the model's weights; neither macOS nor a GPU allows that. On two cores they save a sixth
at most, and each needs memory of its own.
"""

import ctypes
import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeVar

import psutil
import torch

from kvprobe.errors import UserError
from kvprobe.progress import silence

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: Callable[[int], object] = lambda _: None  # noqa: E731, replaced in a forked process
PATIENCE = 5.0
"""Seconds without anything done after which it is asked whether a process was stopped."""
PR_SET_PDEATHSIG = 1
OMP_PAUSE_HARD = 2
_peak = 0
"""The most bytes that this process held together with those that it forked."""


def check_processes(asked: int, device: torch.device) -> None:
    """Refuse a number of processes that cannot work side by side on what a model on this device computes.

    Raises:
        UserError: there are none, or several where they cannot be forked.
    """
    if asked < 1:
        raise UserError(f"{asked} processes were asked for; give a whole number from 1.")
    if asked > 1 and (sys.platform != "linux" or device.type != "cpu" or torch.cuda.is_initialized()):
        raise UserError(
            f"{asked} processes cannot share a model on {sys.platform} and {device.type}, only on a CPU under Linux; "
            "ask for 1."
        )


def forked(work: Callable[[Item], Result], items: Sequence[Item], processes: int) -> Iterator[Result]:
    """`work` of each item in forked processes, each with its share of torch's threads: what it returns, in the order in
    which items are done.

    Args:
        processes: with one of them, or of items, the work is done in this process, with all threads.

    Raises:
        UserError: a process was killed or stopped.
        BaseException: what `work` raised. Other items are given up then, as they are when this is interrupted.
    """
    global _peak
    processes = min(processes, len(items))
    if processes < 2:
        yield from map(work, items)
        return
    _end_threads()
    threads, others = max(1, torch.get_num_threads() // processes), set(multiprocessing.active_children())
    shared = psutil.Process().memory_info().rss
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("fork"),
        initializer=lambda: _begin(lambda place: work(items[place]), threads),
    )
    try:
        for done in _completed([pool.submit(_do, place) for place in range(len(items))], others):
            held, result = done.result()
            _peak = max(_peak, shared + processes * held)
            yield pickle.loads(result)
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                "A process of this run was killed, probably because memory ran out; run it again with --processes 1, "
                "and it resumes."
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _completed(futures: Sequence[Future[tuple[int, bytes]]], others: set[Any]) -> Iterator[Future[tuple[int, bytes]]]:
    """Futures as they are done.

    Args:
        others: children of this process that do not work on them.

    Raises:
        UserError: nothing was done for a while, during which one that works on them did not run at all.
    """
    waiting, before = set(futures), set[int]()
    while waiting:
        done, waiting = wait(waiting, PATIENCE, FIRST_COMPLETED)
        yield from done
        stopped = set[int]()
        for process in set(multiprocessing.active_children()) - others:
            with suppress(psutil.NoSuchProcess):
                if process.pid is not None and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    stopped.add(process.pid)
        if not done and stopped & before:
            raise UserError(
                f"A process of this run, {min(stopped & before)}, was stopped by a signal, so the run would wait for "
                "ever; start it again, and it resumes."
            )
        before = stopped


def peak_bytes() -> int:
    """The most memory that this process has held, with those that it forked; 0 where the system does not say."""
    return max(_own_peak(), _peak)


def _own_peak() -> int:
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _end_threads() -> None:
    """End the threads that OpenMP keeps for torch's next operation, which begins others. GNU's waits for ever, in a
    forked process, for those of the process that forked it."""
    with open("/proc/self/maps", encoding="utf-8") as mapped:
        libraries = {line.split(maxsplit=5)[-1].strip() for line in mapped if "/libgomp" in line}
    for library in libraries:
        with suppress(OSError, AttributeError):  # one that was replaced on disk, or is older than OpenMP 5
            ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_HARD)


def _begin(work: Callable[[int], object], threads: int) -> None:
    """In a forked process, before its first item."""
    global _work
    _work = work
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the process that forked it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked it ends it
    torch.set_num_threads(threads)
    silence()


def _do(place: int) -> tuple[int, bytes]:
    """In a forked process: the work of an item. The most bytes that it has held beside those that it shares, and what
    the work returned: as bytes, since memory that tensors would share ends with the process."""
    result = pickle.dumps(_work(place))
    memory = psutil.Process().memory_full_info()
    return memory.uss + _own_peak() - memory.rss, result
