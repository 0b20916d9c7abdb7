"""A decode step of many rows with weights that are packed once, beside torch's own products.

Both must first give the same logits. Where a processor has AVX-512 and is not AMD's, kvprobe does not pack
(`kvprobe.models.packed`).

    make benchmark          or          python benchmarks/packed.py --model qwen2.5-coder-1.5b
"""

import time
from functools import partial

import torch
from timing import asked, header, paired, report

import kvprobe as kv
from kvprobe.models.packed import packed

ROWS = (2, 4, 16, 60)


def main() -> None:
    arguments = asked(__doc__, 5, "qwen2.5-coder-0.5b")
    plain, quick = (kv.load(arguments.model, dtype="float32").lanes for _ in range(2))
    header(plain.name, 1, arguments.repeats)
    draw = torch.Generator().manual_seed(0)
    for rows in ROWS:
        ids = torch.randint(5, 20_000, (rows, 1), generator=draw)
        start = time.perf_counter()
        with torch.no_grad(), packed(quick.plain, rows):
            packing = time.perf_counter() - start
            torch.testing.assert_close(quick.native(ids), plain.native(ids), rtol=1e-3, atol=1e-3)
            ours, theirs, ratio = paired(partial(quick.native, ids), partial(plain.native, ids), arguments.repeats)
        report(f"A token for {rows} rows (packing takes {packing:.1f} s)", ours, theirs, ratio, "1")


if __name__ == "__main__":
    main()
