"""How cost grows with the length of the prompt, the number of conditions and the layers: kvprobe beside others.

Each point is the median of runs that alternate between the libraries, in seconds of the processor, so that other work
on the machine counts little. The slope is that of a line through the logarithms: 1 is proportional.

    python benchmarks/curves.py [--model smollm2-135m] [--lengths 128 512 2048 8192] [--repeats 3]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from timing import alternated

import kvprobe as kv
from kvprobe.faults import Gaussian, Scope
from kvprobe.patching import LogitDiff, patch_sweep
from kvprobe.text.tokens import Tokens

Run = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--conditions", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, repeats = kv.load(arguments.model), arguments.repeats
    print(f"{model.name}, {torch.get_num_threads()} threads, torch {torch.__version__}, transformers ", end="")
    print(f"{transformers.__version__}, CPU seconds, median of {repeats}")
    curve("prompt, tokens", arguments.lengths, lambda length: reading(model, length), repeats)
    curve("conditions of a sweep", arguments.conditions, lambda count: conditions(model, count), repeats)
    most = model.geometry.n_layers
    curve("patched layers", sorted({1, (most + 3) // 4, most}), lambda count: layers(model, count), repeats)


def curve(what: str, sizes: Sequence[int], runs: Callable[[int], dict[str, Run]], repeats: int) -> None:
    """A table of seconds by size, and the slope of each arm."""
    taken: dict[str, list[float]] = {}
    for size in sizes:
        arms = runs(size)
        for name, seconds in zip(arms, alternated([*arms.values()], repeats, time.process_time), strict=True):
            taken.setdefault(name, []).append(statistics.median(seconds))
    print(f"\n{what:34}{''.join(f'{size:>10,}' for size in sizes)}{'slope':>8}{'ratio':>8}")
    own = next(iter(taken.values()))
    for name, seconds in taken.items():
        cells = "".join(f"{one:10.3f}" for one in seconds)
        ratio = own[-1] / seconds[-1]
        print(f"{name:34}{cells}{slope(sizes, seconds):8.2f}{ratio:8.2f}", flush=True)


def slope(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Of the line through the logarithms of both."""
    if len(sizes) < 2:
        return float("nan")
    logs = [torch.tensor(values, dtype=torch.float64).log() for values in (sizes, seconds)]
    return statistics.linear_regression(*(values.tolist() for values in logs)).slope


def drawn(model: kv.Model, length: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5, model.lanes.plain.config.vocab_size, (length,), generator=draw).tolist()


def reading(model: kv.Model, length: int) -> dict[str, Run]:
    """A prompt's cache, by kvprobe, by transformers, and by TransformerLens."""
    ids = drawn(model, length)
    tensor, bridge = torch.tensor([ids]), model.lanes.hooked.bridge

    def bare() -> Any:
        with torch.no_grad():
            return model.lanes.plain(tensor, use_cache=True, logits_to_keep=1).past_key_values

    def hooked() -> object:
        with torch.no_grad():
            return bridge(tensor, use_cache=True, logits_to_keep=1)

    ours, theirs = model.prefill(ids), bare()
    torch.testing.assert_close(ours.layers[-1]["V"], theirs.layers[-1].values)
    return {"kvprobe": lambda: model.prefill(ids), "bare transformers": bare, "TransformerBridge": hooked}


def conditions(model: kv.Model, count: int) -> dict[str, Run]:
    """A prompt of 64 tokens under so many faults, as rows of one batch and one by one."""
    ids = Tokens.of(drawn(model, 64))
    faults = [Gaussian("channel", scope=Scope(rate=(number + 1) / (2 * count))) for number in range(count)]

    def swept(chosen: list[Gaussian]) -> object:
        return model.sweep(ids, chosen, max_new_tokens=2, stop=(), follow=False)

    return {"kvprobe": lambda: swept(faults), "a condition at a time": lambda: [swept([one]) for one in faults]}


def layers(model: kv.Model, count: int) -> dict[str, Run]:
    """Four slots of a prompt of 64 tokens patched in each of the last layers."""
    base, donor = (model.prefill(drawn(model, 64, seed)) for seed in (0, 1))
    grid = {"layer": range(model.geometry.n_layers - count, model.geometry.n_layers), "slot": range(20, 24)}
    suffix, metric = Tokens.of([7, 8, 9], "suffix", 64), LogitDiff(6, 7)
    return {"kvprobe": lambda: patch_sweep(model, base, donor, suffix, metric, grid, progress=False)}


if __name__ == "__main__":
    main()
