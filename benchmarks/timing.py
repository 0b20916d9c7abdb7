"""Paired timings: runs alternate, so that a drift of the machine's speed touches both sides."""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch


def asked(about: str | None, repeats: int, model: str = "smollm2-135m") -> argparse.Namespace:
    """`repeats` and `model` as the command line has them, or these; torch gets all cores."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--model", default=model)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return parser.parse_args()


def header(model: str, length: int, repeats: int) -> None:
    print(f"{model}, {length} tokens, {torch.get_num_threads()} threads, median of {repeats} pairs\n")
    print(f"{'what':50}{'kvprobe':>10}{'beside':>10}{'ratio':>8}  limit")


def paired(one: Callable[[], object], other: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of their paired ratios; which goes first alternates."""
    times: list[tuple[float, float]] = []
    for turn in range(repeats + 1):
        order = (one, other) if turn % 2 else (other, one)
        taken = {}
        for run in order:
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken[run] = time.perf_counter() - start
        if turn:  # the first pair warms up
            times.append((taken[one], taken[other]))
    ours, theirs = zip(*times, strict=True)
    return (
        statistics.median(ours),
        statistics.median(theirs),
        statistics.median(mine / yours for mine, yours in times),
    )


def report(what: str, ours: float, theirs: float, ratio: float, limit: str) -> None:
    print(f"{what:50}{ours:9.3f}s{theirs:9.3f}s{ratio:8.3f}  {limit}", flush=True)
