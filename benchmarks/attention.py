"""Last-token patterns of a long prompt, all layers and heads: peak memory and time beside the hooked lane's patterns.

Each lane runs in a process of its own, so that the peaks do not mix; both must give the same weights. The peak is the
most memory that the process held, minus what it held before (weights and imports) and minus the cache that it returns.
The hooked lane is one pass over the prompt, as `run_with_hooks` is; it needs heads × length² numbers a layer, several
times over.

    python benchmarks/attention.py --length 4096          # the plain lane alone: add --plain-only
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch

import kvprobe as kv
from kvprobe.attention.patterns import CHUNK
from kvprobe.text.tokens import Tokens

LIMIT = 300e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--plain-only", action="store_true")
    parser.add_argument("--lane", choices=["plain", "hooked"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lane:
        measure(arguments)
        return
    lanes = ["plain"] if arguments.plain_only else ["plain", "hooked"]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for lane in lanes:
            out = Path(folder) / f"{lane}.npz"
            flags = ["--model", arguments.model, "--length", str(arguments.length), "--lane", lane, "--out", str(out)]
            subprocess.run([sys.executable, __file__, *flags], check=True)
            results[lane] = dict(np.load(out))
    print(f"{arguments.model}, {arguments.length} tokens, last-token patterns of all layers and heads\n")
    print(f"{'lane':10}{'seconds':>10}{'MB above weights and cache':>30}{'cache, MB':>12}")
    for lane, result in results.items():
        print(f"{lane:10}{result['seconds']:10.1f}{result['above'] / 1e6:30.0f}{result['cache'] / 1e6:12.0f}")
    if len(results) == 2:
        worst = np.abs(results["plain"]["weights"] - results["hooked"]["weights"]).max()
        print(f"\nlargest difference between their weights: {worst:.1e}")
        assert worst < 1e-5
    assert results["plain"]["above"] < LIMIT


def measure(arguments: argparse.Namespace) -> None:
    """One lane's weights, seconds, and peak."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = kv.load(arguments.model)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 20_000, (arguments.length,), generator=rng).tolist()
    # What a lane loads at its first pass is not counted.
    kv.attend(model, Tokens.of(ids[:8]), lane=arguments.lane)
    chunk = arguments.length if arguments.lane == "hooked" else CHUNK
    watched = Peak()
    start = time.perf_counter()
    with watched:
        patterns = kv.attend(model, Tokens.of(ids), lane=arguments.lane, chunk=chunk)
    seconds = time.perf_counter() - start
    above = watched.bytes - patterns.cache.nbytes
    np.savez(arguments.out, weights=patterns.weights.numpy(), seconds=seconds, above=above, cache=patterns.cache.nbytes)


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
    main()
