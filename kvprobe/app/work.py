"""One queue and one worker for all tabs: the library has settings of the whole process, and a model computes for one at
a time."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from kvprobe.errors import UserError

MOST_WAITING = 16
KEPT = 64
"""Jobs that are remembered."""
ENDS = ("done", "failed", "cancelled")
Step = Callable[[str], None]
Work = Callable[[Step], Any]
"""Gets a function that it calls with what it is doing."""


class CancelledJob(Exception):
    """Nobody waits for this any more."""


@dataclass(eq=False)
class Job:
    """Something to be computed, and what has been said of it: pairs of `step`, `done`, `failed` or `cancelled` and what
    is meant."""

    work: Work
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    said: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    changed: threading.Condition = field(default_factory=threading.Condition)
    cancelled: bool = False

    @staticmethod
    def failed(why: str) -> "Job":
        """One that is not begun."""
        return Job(lambda step: None, said=[("failed", why)])

    def say(self, what: str, content: Any = None) -> None:
        with self.changed:
            self.said.append((what, content))
            self.changed.notify_all()

    def step(self, what: str) -> None:
        """Between two steps a job can be cancelled."""
        if self.cancelled:
            raise CancelledJob
        self.say("step", what)

    def events(self, patience: float = 1.0) -> Iterator[tuple[str, Any]]:
        """All that is said, from the beginning to the end; `wait` after each while without news."""
        at = 0
        while True:
            with self.changed:
                if at == len(self.said):
                    self.changed.wait(patience)
                news, at = self.said[at:], len(self.said)
            yield from news or [("wait", None)]
            if news and news[-1][0] in ENDS:
                return


class Worker:
    """A thread that does one job after the other."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        self._queue: Queue[Job] = Queue()
        threading.Thread(target=self._work, daemon=True, name="kvprobe-worker").start()

    def add(self, work: Work) -> Job:
        """Queue something.

        Raises:
            UserError: too much is waiting.
        """
        if self._queue.qsize() >= MOST_WAITING:
            raise UserError(f"{MOST_WAITING} requests are waiting already; wait for one, or cancel it.")
        job = self.note(Job(work))
        if self._queue.unfinished_tasks:
            job.say("step", "waiting for another request")
        self._queue.put(job)
        return job

    def note(self, job: Job) -> Job:
        """Remember a job, so that it can be listened to."""
        self.jobs[job.name] = job
        while len(self.jobs) > KEPT:
            self.jobs.popitem(last=False)
        return job

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            try:
                job.step("starting")
                job.say("done", job.work(job.step))
            except CancelledJob:
                job.say("cancelled")
            except UserError as error:
                job.say("failed", str(error))
            except Exception as error:  # the page says it, and the worker goes on
                job.say("failed", f"This is a defect of kvprobe: {type(error).__name__}: {error}")
            finally:
                self._queue.task_done()
