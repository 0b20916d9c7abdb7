"""What a benchmark gives, how it is timed, and how it is asked.

A benchmark is a script of this folder with a function `measure`, which asserts that both sides give the same and yields
a `Row` for each comparison. The script prints its rows; `bench.py` puts those of all scripts on one page. Runs
alternate, so that a drift of the machine's speed touches both sides.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path

import numpy as np
import torch

from kvprobe.environment import environment
from kvprobe.stats import FEWEST, Estimate, estimate

UNKNOWN = Estimate(nan)


@dataclass(frozen=True)
class Row:
    """A comparison of kvprobe with something else.

    Attributes:
        what: is compared.
        beside: what kvprobe is held against; empty for a curve's own numbers.
        ours, theirs: medians, in `unit`; None where nothing was measured, and `note` says why.
        ratio: of ours to theirs, the geometric mean of pairs, with its interval over so many of them.
        most: the ratio is meant to be at most this.
        grows, size: of a point of a curve: what grows, and how much of it there is.
    """

    what: str
    beside: str
    ours: float | None = None
    theirs: float | None = None
    ratio: Estimate = UNKNOWN
    unit: str = "s"
    most: float | None = None
    note: str = ""
    grows: str = ""
    size: int = 0

    @classmethod
    def of(cls, what: str, beside: str, ours: Sequence[float], theirs: Sequence[float], **more: object) -> "Row":
        """From pairs of values."""
        logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
        medians = statistics.median(ours), statistics.median(theirs)
        return cls(what, beside, *medians, estimate(logs).exponential, **more)  # pyright: ignore[reportArgumentType]

    @property
    def size_of_ratio(self) -> str:
        """The ratio with its interval, or with its range where pairs are fewer than an interval takes."""
        low, high = self.ratio.ends
        pairs = self.ratio.clusters
        ends = f" ({low:.3g} to {high:.3g})" if pairs > 1 else ""
        return "" if self.ratio.unknown else f"{self.ratio.mean:.3g}{ends}"

    def __str__(self) -> str:
        sizes = "".join(f"{'' if size is None else f'{size:.4g}':>11}" for size in (self.ours, self.theirs))
        most = "" if self.most is None else f"  at most {self.most:g}"
        where = f"{self.grows} {self.size:,}: " if self.grows else ""
        return f"{where + self.what:52}{self.beside:34}{sizes} {self.unit:4}{self.size_of_ratio:>24}{most}  {self.note}"


HEADS = f"{'what':52}{'beside':34}{'kvprobe':>11}{'beside':>11} {'unit':4}{'ratio':>24}"


def main(
    measure: Callable[[argparse.Namespace], Iterable[Row]],
    about: str | None,
    *,
    repeats: int = 9,
    quick: int = 2,
    model: str = "smollm2-135m",
    threads: int | None = None,
    flags: Callable[[argparse.ArgumentParser], object] = lambda _: None,
) -> None:
    """Measure what the command line asks for, and print rows as they come.

    Args:
        repeats, quick: pairs of runs, and with `--quick`, which asks for smaller settings too.
        threads: of torch; all cores by default.
        flags: adds those of this script alone.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small settings, which show that it works")
    parser.add_argument("--repeats", type=int, help=f"pairs of runs; from {FEWEST} on ratios have intervals")
    parser.add_argument("--model", default=model)
    parser.add_argument("--json", type=Path, help="keep the rows there")
    flags(parser)
    asked = parser.parse_args()
    asked.repeats = asked.repeats or (quick if asked.quick else repeats)
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    print(f"{asked.model}, {torch.get_num_threads()} threads, {clock_name()}, {asked.repeats} pairs\n\n{HEADS}")
    start, rows = time.process_time(), list[Row]()
    for row in measure(asked):
        print(row, flush=True)
        rows.append(row)
    if asked.json:
        how = {"model": asked.model, "repeats": asked.repeats, "threads": torch.get_num_threads()}
        kept = {
            "about": about,
            "rows": [{**asdict(row), "ratio": row.ratio.record()} for row in rows],
            "how": how | {"clock": clock_name(), "cpu seconds": time.process_time() - start},
            "environment": environment() | {"date": time.strftime("%Y-%m-%d %H:%M"), "load": os.getloadavg()[0]},
        }
        asked.json.write_text(json.dumps(kept, indent=1))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, most: float = 1e-4) -> None:
    """Both are the same but for rounding: no number is off by more than this share of the largest. Products of other
    shapes are summed in another order, and each processor has its own."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=most * float(theirs.abs().max()))


def clock() -> float:
    """Seconds of the processor where one thread works, so that other work on the machine counts little; else of the
    wall."""
    return time.perf_counter() if torch.get_num_threads() > 1 or torch.cuda.is_available() else time.process_time()


def clock_name() -> str:
    many = torch.get_num_threads() > 1 or torch.cuda.is_available()
    return "seconds of the wall" if many else "seconds of the processor"


def alternated(
    runs: Sequence[Callable[[], object]], repeats: int, clock: Callable[[], float] = clock
) -> list[list[float]]:
    """Seconds of each run in each turn; the order is reversed from turn to turn, and the first turn is not counted."""
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for number in range(len(runs))[:: 1 if turn % 2 else -1]:
            start = clock()
            runs[number]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                taken[number].append(clock() - start)
    return taken


def compared(
    what: str,
    beside: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int,
    *,
    most: float | None = None,
    note: str = "",
) -> Row:
    """Both timed, turn by turn."""
    return Row.of(what, beside, *alternated([ours, theirs], repeats), most=most, note=note)


def paired(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of their paired ratios."""
    ours, theirs = alternated([one, other], repeats)
    ratios = [mine / yours for mine, yours in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios)
