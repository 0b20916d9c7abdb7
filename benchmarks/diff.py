"""Time and memory of `kvprobe diff` on two caches of 1 GB together, in files.

    python benchmarks/diff.py [--bytes 1000000000] [--seconds 10] [--memory 500]

The second cache is the first with rounding noise everywhere, and a block of one layer zeroed. Each run is a process of
its own, whose largest memory the system reports (Linux): most of it is what Python, torch and transformers take. Time
is that of the processor, so that others at work on the machine do not count. Fails above the limits, or where the block
is not found.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.ledger import Ledger

LAYERS, HEADS, NUMBERS = 32, 8, 128
STRUCK = 20

RUN = """
import json, sys, time
import kvprobe as kv
start = time.process_time()
found = kv.diff(kv.open_cache(sys.argv[1]), kv.open_cache(sys.argv[2]))
seconds = time.process_time() - start
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
most = int(status["VmHWM"].split()[0]) / 1024  # of this process alone; getrusage counts its parent's, too
print(json.dumps({"kind": found.kind, "layers": found.layers, "seconds": seconds, "memory": most}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--memory", type=float, default=500.0, help="MiB")
    arguments = parser.parse_args()
    failed = False
    for dtype in (torch.float32, torch.bfloat16):
        with TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("damaged.safetensors", "right.safetensors")]
            slots = arguments.bytes // (4 * LAYERS * HEADS * NUMBERS * dtype.itemsize)
            write(paths, slots, dtype)
            size = sum(path.stat().st_size for path in paths)
            found = json.loads(
                subprocess.run([sys.executable, "-c", RUN, *map(str, paths)], check=True, capture_output=True).stdout
            )
        right = found["kind"] == "zeroed" and found["layers"] == [STRUCK]
        fits = found["seconds"] <= arguments.seconds and found["memory"] <= arguments.memory
        failed |= not (right and fits)
        print(
            f"{dtype}: {size / 1e9:.2f} GB, {slots} slots of {LAYERS} layers: {found['seconds']:.1f} s of at most "
            f"{arguments.seconds:g}, {found['memory']:.0f} MiB of at most {arguments.memory:g}; {found['kind']} in "
            f"layers {found['layers']}"
        )
    sys.exit(int(failed))


def write(paths: list[Path], slots: int, dtype: torch.dtype) -> None:
    """The damaged cache, and the right one."""
    torch.manual_seed(0)
    shape = (1, HEADS, slots, NUMBERS)
    ledger = Ledger.of(torch.randint(0, 1000, (1, slots)))
    keys, values = ([torch.randn(shape) for _ in range(LAYERS)] for _ in range(2))
    rounded(keys, values, ledger, dtype).save(paths[1])
    noise = torch.finfo(dtype).eps / 4
    for part in (keys, values):
        for tensor in part:
            tensor.mul_(1 + noise * torch.randn(shape))
        part[STRUCK][:, :, 16:32] = 0.0
    rounded(keys, values, ledger, dtype).save(paths[0])


def rounded(keys: list[Tensor], values: list[Tensor], ledger: Ledger, dtype: torch.dtype) -> KVCache:
    return KVCache.of([tensor.to(dtype) for tensor in keys], [tensor.to(dtype) for tensor in values], ledger)


if __name__ == "__main__":
    main()
