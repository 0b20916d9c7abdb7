"""Last-token patterns of a long prompt, all layers and heads: peak memory and time beside the hooked lane's patterns.

Each lane runs in a process of its own, so that the peaks do not mix; both must give the same weights. The peak is the
most memory that the process held, minus what it held before (weights and imports) and minus the cache that it returns.
The hooked lane is one pass over the prompt, as `run_with_hooks` is; it needs heads × length² numbers a layer, several
times over.

    python benchmarks/attention.py
"""

import argparse
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from timing import Row, clock, main

import kvprobe as kv
from kvprobe.attention.patterns import CHUNK
from kvprobe.text.tokens import Tokens

MOST_BYTES = 300e6


def measure(asked: argparse.Namespace) -> Iterator[Row]:
    length, results = 512 if asked.quick else 4096, dict[str, Any]()
    with TemporaryDirectory() as folder:
        for lane in ("plain", "hooked"):
            out = Path(folder) / f"{lane}.npz"
            subprocess.run([sys.executable, __file__, lane, asked.model, str(length), str(out)], check=True)
            results[lane] = dict(np.load(out))
    ours, theirs = results.values()
    assert np.abs(ours["weights"] - theirs["weights"]).max() < 1e-5
    assert ours["above"] < MOST_BYTES
    for what, unit in (("seconds", "s"), ("above", "B")):
        name = f"the last of {length:,} tokens' attention"
        beside = "TransformerLens, hooked patterns"
        yield Row.of(name, beside, [float(ours[what])], [float(theirs[what])], unit=unit, note=NOTES[unit])


NOTES = {"s": "one run of each", "B": "the peak above weights and cache, one run of each"}


def one_lane(lane: Any, name: str, length: int, out: Path) -> None:
    """One lane's weights, seconds, and peak."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = kv.load(name)
    ids = torch.randint(5, 20_000, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    # What a lane loads at its first pass is not counted.
    kv.attend(model, Tokens.of(ids[:8]), lane=lane)
    start = clock()
    with Peak() as watched:
        patterns = kv.attend(model, Tokens.of(ids), lane=lane, chunk=length if lane == "hooked" else CHUNK)
    seconds = clock() - start
    np.savez(out, weights=patterns.weights.numpy(), seconds=seconds, above=watched.bytes - patterns.cache.nbytes)


class Peak:
    """The most memory that this process holds above what it held at the start, sampled and checked with the kernel."""

    def __enter__(self) -> "Peak":
        self.before = psutil.Process().memory_info().rss
        self.most, self.done = self.before, False
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done = True
        self.thread.join()
        # The kernel's own peak misses nothing, but may lie before the start.
        kernel = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.bytes = max(self.most, kernel if kernel > self.most else 0) - self.before

    def _watch(self) -> None:
        while not self.done:
            self.most = max(self.most, psutil.Process().memory_info().rss)
            time.sleep(0.002)


if __name__ == "__main__":
    if len(sys.argv) == 5 and not sys.argv[1].startswith("-"):  # a process of its own
        one_lane(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(measure, __doc__)
