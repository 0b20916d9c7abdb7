"""Progress of long work: a bar for each stage, and beside it what the whole run will still take.

A run that was measured before says when each stage began. The present run is compared with it stage by stage, so the
estimate follows the machine at hand.
"""

import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psutil
from tqdm.auto import tqdm

Item = TypeVar("Item")
SETTLING = 5.0
"""Seconds for which a run is taken to be as fast as the one that was measured."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run: what its bar counts, and after how many seconds it began."""

    name: str
    total: int
    unit: str
    began: float


@dataclass(frozen=True)
class Timing:
    """How long a run took.

    Attributes:
        seconds: of the wall.
        cpu_seconds: of all cores together.
        others: how many cores other processes used meanwhile, on average; beside others, seconds are too long.
    """

    seconds: float
    cpu_seconds: float
    others: float
    stages: tuple[Stage, ...] = ()

    def lasted(self, stage: int) -> float:
        """Seconds from a stage's beginning to that of the next one."""
        following = self.stages[stage + 1].began if stage + 1 < len(self.stages) else self.seconds
        return following - self.stages[stage].began


class Clock:
    """Watches a run: which stages it goes through, and what it will still take.

    Attributes:
        inside: whether a stage has begun and not ended; bars within it are no stages.
    """

    def __init__(self, expected: Timing | None = None) -> None:
        """
        Args:
            expected: what an equal run took, if one was measured.
        """
        self.inside = False
        self._expected, self._stages = expected, list[Stage]()
        self._place, self._skipped = -1, 0.0
        self._started = _times()

    @property
    def timing(self) -> Timing:
        """What the run has taken so far."""
        seconds, cpu, busy = (now - before for now, before in zip(_times(), self._started, strict=True))
        return Timing(seconds, cpu, max(0.0, busy - cpu) / max(seconds, 1e-9), tuple(self._stages))

    def begin(self, name: str, total: int, unit: str, already: int = 0) -> None:
        """A stage begins, of which an earlier attempt did so many. Those of the expected run between the last and this
        one were skipped; where this one is none of them, nothing more is expected."""
        self._stages.append(Stage(name, total, unit, self.timing.seconds))
        if self._expected is None:
            return
        ahead = range(self._place + 1, len(self._expected.stages))
        place = next((place for place in ahead if self._expected.stages[place].name == name), None)
        if place is None:
            self._expected = None
            return
        self._skipped += sum(map(self._expected.lasted, range(self._place + 1, place)))
        self._skipped += self._expected.lasted(place) * already / max(1, total)
        self._place = place

    def left(self, share: float) -> float | None:
        """Seconds until the run ends, with this share of the present stage done; None without an expectation."""
        if self._expected is None or self._place < 0:
            return None
        done = self._expected.stages[self._place].began + share * self._expected.lasted(self._place)
        worked = max(0.0, done - self._skipped)
        return (self._expected.seconds - done) * (self.timing.seconds + SETTLING) / (worked + SETTLING)


def _times() -> tuple[float, float, float]:
    """Seconds of the wall, of this process and those that it forked and that have ended, and of all processes."""
    of_all = psutil.cpu_times()
    return time.perf_counter(), sum(os.times()[:4]), sum(of_all) - of_all.idle - getattr(of_all, "iowait", 0.0)


_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextmanager
def watched(expected: Timing | None = None) -> Generator[Clock]:
    """A clock to which every bar within is a stage."""
    clock = Clock(expected)
    token = _clock.set(clock)
    try:
        yield clock
    finally:
        _clock.reset(token)


_silent = False


def silence() -> None:
    """No bar is shown from now on. In a forked process, whose parent shows them; a lock that another thread held there
    is never freed, so bars get a new one."""
    global _silent
    _silent = True
    Bar.set_lock(threading.RLock())


class Bar(tqdm, Generic[Item]):
    """tqdm's bar, in a notebook its widget. In a watched run it is a stage, and says what the run will still take."""

    _watched: Clock | None = None

    def __init__(self, iterable: Iterable[Item] | None = None, **settings: Any) -> None:
        """See `tqdm.tqdm`; a stage wants `desc`, `unit` and a total."""
        if _silent:
            settings["disable"] = True
        super().__init__(iterable, **settings)
        clock = _clock.get()
        if clock is not None and not clock.inside and not self.disable:
            self._watched, clock.inside = clock, True
            clock.begin(str(self.desc).removesuffix(": "), int(self.total or 0), self.unit, int(self.initial))

    def __iter__(self) -> Iterator[Item]:
        return super().__iter__()

    @property
    def format_dict(self) -> dict[str, object]:
        shown = dict(super().format_dict)
        left = self._watched.left(self.n / self.total) if self._watched and self.total else None
        return shown if left is None else {**shown, "postfix": f"{self.format_interval(left)} to the end of the run"}

    def close(self) -> None:
        if self._watched is not None:
            self._watched.inside, self._watched = False, None
        super().close()
