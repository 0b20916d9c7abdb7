"""A decode step of many rows with weights that are packed once, beside torch's own products.

Both must first give the same logits. Where a processor has AVX-512 and is not AMD's, kvprobe does not pack
(`kvprobe.models.packed`).

    python benchmarks/packed.py --model qwen2.5-coder-1.5b
"""

import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from timing import Row, assert_same, compared, main

import kvprobe as kv
from kvprobe.models.packed import packed

ROWS = (2, 4, 16, 60)


def measure(asked: Namespace) -> Iterator[Row]:
    plain, quick = (kv.load(asked.model, dtype="float32").lanes for _ in range(2))
    draw = torch.Generator().manual_seed(0)
    for rows in ROWS[-1:] if asked.quick else ROWS:
        ids = torch.randint(5, 20_000, (rows, 1), generator=draw)
        start = time.perf_counter()
        with torch.no_grad(), packed(quick.plain, rows):
            packing = time.perf_counter() - start
            assert_same(quick.native(ids), plain.native(ids))
            ours, theirs = partial(quick.native, ids), partial(plain.native, ids)
            row = compared(f"a token for {rows} rows", "torch's own products", ours, theirs, asked.repeats, most=1)
        yield replace(row, note=f"packing takes {packing:.1f} s once")


if __name__ == "__main__":
    main(measure, __doc__, model="qwen2.5-coder-0.5b")
