"""How near kvprobe comes to what a card can do: patch cells, fault rows, prefill and decode, in bfloat16 and float32.

The ceilings are those of the same card in the same run: bytes a second of a copy within it, and FLOP a second of a
product of square matrices in the same dtype, by torch alone. Of each task the least work and the least traffic are
counted (below); the roofline is the time that the slower of the two takes at its ceiling, and the share is that time
beside the measured one. Bytes of activations and work of norms are not counted, and every weight counts for every
token, so the model must be dense.

    python benchmarks/gpu.py --model Qwen/Qwen2.5-7B-Instruct --tokens 2048
    python benchmarks/gpu.py --device cpu --model recall-attention-0 --tokens 32       the arithmetic, anywhere

Presets that need such a card: `kvprobe run gsm8k-qwen2.5-7b`, `gsm8k-qwen2.5-7b-full`, `bands-qwen2.5-7b` and
`bands-qwen2.5-7b-full`.
"""

import argparse
import gc
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from timing import alternated

import kvprobe as kv
from kvprobe.faults import Gaussian, Scope
from kvprobe.inference.generate import generate
from kvprobe.patching import LogitDiff, patch_sweep
from kvprobe.text.tokens import Tokens

SUFFIX, SLOTS, FAULTS, NEW = 6, 4, 16, 16
"""Tokens after the patched prompt, patched slots of each layer, rows of faults, and tokens that are generated."""


@dataclass(frozen=True)
class Work:
    """What a task must do at least: FLOP, and bytes read or written."""

    flop: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """FLOP and bytes a second of a device, measured."""

    flop: float
    bytes: float

    def seconds(self, work: Work) -> float:
        """The roofline: no device with these ceilings does the work in less."""
        return max(work.flop / self.flop, work.bytes / self.bytes)


@dataclass(frozen=True)
class Shape:
    """What counts of a model.

    Attributes:
        matrices: weights that each token is multiplied with, without the unembedding.
        head: weights of the unembedding.
        number: bytes of a number.
        wide: numbers of all query heads of all layers.
        slot: bytes of the K and V of a token.
    """

    matrices: int
    head: int
    number: int
    wide: int
    slot: int

    @classmethod
    def of(cls, model: kv.Model) -> "Shape":
        network, shape, number = model.lanes.plain, model.geometry, model.lanes.dtype.itemsize
        output: Any = network.get_output_embeddings()
        inward: Any = network.get_input_embeddings()
        embeddings = {id(matrix): matrix.numel() for matrix in (output.weight, inward.weight)}
        total, head = sum(weight.numel() for weight in network.parameters()), output.weight.numel()
        wide = shape.n_layers * shape.n_heads * shape.d_head
        slot = 2 * number * shape.n_layers * shape.n_kv_heads * shape.d_head
        return cls(total - sum(embeddings.values()), head, number, wide, slot)

    def reading(self, tokens: int, past: int = 0, rows: int = 1, layers: float = 1.0) -> Work:
        """Tokens of each row read at once after a past that rows share or not, with the logits of the last.

        Args:
            layers: the share of them that is computed.
        """
        seen = tokens * past + tokens * (tokens + 1) / 2
        flop = rows * (layers * (2 * tokens * self.matrices + 4 * self.wide * seen) + 2 * self.head)
        weights = self.number * (layers * self.matrices + self.head)
        return Work(flop, weights + layers * rows * self.slot * (past + tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("There is no GPU here; run this where one is, or try it with --device cpu on a small model.")
    card = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else platform.processor()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{arguments.model} on {card or arguments.device}, {time.strftime('%Y-%m-%d')}, {versions}")
    print(f"{arguments.tokens} tokens, median of {arguments.repeats}\n")
    for dtype in arguments.dtype:
        compare(arguments, dtype)
        gc.collect()


def compare(arguments: argparse.Namespace, dtype: str) -> None:
    """The tasks in one dtype beside the ceilings of it."""
    limits = ceilings(torch.device(arguments.device), getattr(torch, dtype))
    print(f"{dtype}: {limits.flop / 1e9:,.0f} GFLOP/s by torch.mm, {limits.bytes / 1e9:,.1f} GB/s by a copy")
    print(f"{'task':40}{'seconds':>10}{'GFLOP':>12}{'GB':>10}{'roofline, s':>13}{'share':>8}")
    for name, run, work in tasks(kv.load(arguments.model, device=arguments.device, dtype=dtype), arguments.tokens):
        seconds, best = timed(run, arguments.repeats), limits.seconds(work)
        sizes = f"{work.flop / 1e9:12.2f}{work.bytes / 1e9:10.3f}"
        print(f"{name:40}{seconds:10.4f}{sizes}{best:13.4f}{best / seconds:8.1%}", flush=True)


def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """What torch alone does on this device: the largest rate of several sizes."""
    large = device.type == "cuda"
    sides, megabytes = ((4096, 8192), (512, 2048)) if large else ((256, 512), (16, 64))
    products, copies = [], []
    for side in sides:
        one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        products.append(2 * side**3 / timed(partial(torch.mm, one, other), 5))
    for size in megabytes:
        source = torch.zeros(size << 20, dtype=torch.uint8, device=device)
        copies.append(2 * source.nbytes / timed(partial(torch.empty_like(source).copy_, source), 5))
    return Ceilings(max(products), max(copies))


def tasks(model: kv.Model, tokens: int) -> list[tuple[str, Callable[[], object], Work]]:
    """Each task, how it is run, and the least work of it."""
    draw, vocabulary = torch.Generator().manual_seed(0), model.lanes.plain.config.vocab_size
    ids, other, after = (
        Tokens.of(torch.randint(5, vocabulary, (count,), generator=draw).tolist(), name, start)
        for count, name, start in ((tokens, "prompt", 0), (tokens, "prompt", 0), (SUFFIX, "suffix", tokens))
    )
    cache, donor, shape = model.prefill(ids), model.prefill(other), Shape.of(model)
    layers = model.geometry.n_layers
    grid = {"layer": range(layers), "slot": range(tokens // 2, tokens // 2 + SLOTS)}
    cells = 2 * layers * SLOTS
    faults = [Gaussian("channel", scope=Scope(rate=number / FAULTS)) for number in range(FAULTS)]
    # A patch is felt from its layer on; cells of a layer are rows of one pass.
    patched = [shape.reading(SUFFIX, tokens, 2 * SLOTS, (layers - layer) / layers) for layer in range(layers)]
    swept = [shape.reading(1, tokens + step, FAULTS) for step in range(NEW)]
    decoded = [shape.reading(1, tokens + step) for step in range(NEW)]
    question = [Tokens.of([7], "question", tokens)]
    metric = LogitDiff(6, 7)
    return [
        ("prefill", lambda: model.prefill(ids), shape.reading(tokens)),
        (
            f"decode {NEW} tokens",
            lambda: generate(model.lanes, question, cache, max_new_tokens=NEW, stop=()),
            added(decoded),
        ),
        (
            f"patch {cells} cells, suffix of {SUFFIX}",
            lambda: patch_sweep(model, cache, donor, after, metric, grid, parts=("K", "V"), progress=False),
            added(patched),
        ),
        (
            f"{FAULTS} rows of faults, prompt and {NEW} tokens",
            lambda: model.sweep(ids, faults, max_new_tokens=NEW, stop=(), follow=False),
            added([shape.reading(tokens), *swept]),
        ),
    ]


def added(parts: list[Work]) -> Work:
    return Work(sum(part.flop for part in parts), sum(part.bytes for part in parts))


def timed(run: Callable[[], object], repeats: int) -> float:
    """Median seconds, after a first run that is not counted (the gate's proofs are in it)."""
    return statistics.median(alternated([run], repeats)[0])


if __name__ == "__main__":
    main()
