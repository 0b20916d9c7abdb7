"""Paired timings: runs alternate, so that a drift of the machine's speed touches both sides."""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch


def asked(about: str | None, repeats: int, model: str = "smollm2-135m", *switches: str) -> argparse.Namespace:
    """`repeats` and `model` as the command line has them, or these, and which `switches`; torch gets all cores."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--model", default=model)
    for switch in switches:
        parser.add_argument(f"--{switch}", action="store_true")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return parser.parse_args()


def header(model: str, length: int, repeats: int) -> None:
    print(f"{model}, {length} tokens, {torch.get_num_threads()} threads, median of {repeats} pairs\n")
    print(f"{'what':50}{'kvprobe':>10}{'beside':>10}{'ratio':>8}  limit")


def alternated(
    runs: Sequence[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
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


def paired(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of their paired ratios."""
    ours, theirs = alternated([one, other], repeats)
    ratios = [mine / yours for mine, yours in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios)


def report(what: str, ours: float, theirs: float, ratio: float, limit: str) -> None:
    print(f"{what:50}{ours:9.3f}s{theirs:9.3f}s{ratio:8.3f}  {limit}", flush=True)
