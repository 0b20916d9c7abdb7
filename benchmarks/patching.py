"""A map of patched cells with kvprobe, beside the libraries that a user would pick instead: same cells, same results.

kvprobe sweeps the whole map, layer × slot × {K, V}. The others take seconds for a cell, at any layer, so they are timed
on a sample of it. What they compute is in `patched_forward.py`. Each round begins with another contender, and a ratio
is the median of the ratios of the rounds.

    make benchmark          or          python benchmarks/patching.py --tokens 512 --repeats 3
    python benchmarks/patching.py --memory --tokens 2048 --slots 2048       only the memory of one sweep
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from patched_forward import Part, Patch, Setting, by_bridge, by_extend, by_nnsight

import kvprobe as kv
from kvprobe.patching import LogitDiff, patch_sweep
from kvprobe.patching.rows import ROWS

SUFFIX = 6
PARTS: tuple[Part, ...] = ("K", "V")
BATCHES = (2, 4, 8, 16)
SAMPLED_TOKENS = 2048
"""Tokens of all prompts that the others read in a round; with longer prompts they read fewer cells."""
STRIDE = 61
"""The step at which cells of the map are read by `extend` too; prime, so that all layers, slots and parts occur."""
BOUND = 1e-3
"""Values may differ by this share of the largest effect on the map."""
LIMITS = {(512, "alone"): "60", (512, "batched"): "30", (2048, "alone"): "150"}

Key = tuple[int, Part, int]
"""Layer, part and slot of a cell."""


@dataclass
class Contender:
    """One way to patch these cells: seconds of each round, and the metric of each cell."""

    name: str
    cells: int
    run: Callable[[], dict[Key, float]]
    limit: str = ""
    seconds: list[float] = field(default_factory=list)
    values: dict[Key, float] = field(default_factory=dict)

    @property
    def per_cell(self) -> float:
        return statistics.median(self.seconds) / self.cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048], help="lengths of the prompt")
    parser.add_argument("--slots", type=int, default=60, help="of the prompt that the map goes over, evenly spaced")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--memory", action="store_true", help="only the peak memory of one sweep, at the longest prompt"
    )
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    longest = max(arguments.tokens)
    if arguments.memory:
        memory(arguments.model, longest, arguments.slots)
        return
    # A process of its own, and before this one grows: Linux counts a child's peak from its parent's.
    command = [sys.executable, __file__, "--memory", "--tokens", str(longest), "--slots", str(arguments.slots)]
    subprocess.run([*command, "--model", arguments.model], check=True)
    model = kv.load(arguments.model, device="cpu", dtype="float32")
    for length in arguments.tokens:
        compare(model, length, arguments.slots, arguments.repeats)


def compare(model: kv.Model, length: int, slots: int, repeats: int) -> None:
    """Time every contender on this length, assert that their values are equal, and print both."""
    setting = Setting.drawn(model, length, SUFFIX)
    metric, over = furthest(setting), evenly(range(length), slots)
    contenders = all_contenders(setting, metric, over)
    ours = contenders[0]
    rates = rounds(contenders, repeats, rate=lambda: matmul_rate(model))

    clean = float(metric(model.extend(setting.base, setting.suffix)[1][0]))
    effect = max(abs(value - clean) for value in ours.values.values())
    widest = 0.0
    for contender in contenders:
        gap = max(abs(value - ours.values[key]) for key, value in contender.values.items())
        allowed = BOUND * effect
        assert gap <= allowed, f"{contender.name} is {gap:.1e} from the sweep, where {allowed:.1e} is allowed"
        widest = max(widest, gap)
    table(model, length, contenders, over)
    print(f"equal: logit differences within {widest:.1e}; the bound is {BOUND} of the largest effect, {effect:.2f}")
    work, rate = flops(model, length), statistics.median(rates)
    times = statistics.median(taken / ours.cells * rate / work for taken, rate in zip(ours.seconds, rates, strict=True))
    print(
        f"floor: {work / 1e9:.2f} GFLOP a cell at the {rate / 1e9:.0f} GFLOP/s of torch.mm is {1e3 * work / rate:.1f} "
        f"ms; the sweep takes {times:.2f} times that",
        flush=True,
    )


def all_contenders(setting: Setting, metric: LogitDiff, over: Sequence[int]) -> list[Contender]:
    """The sweep, then those that are timed on a sample of its cells, each warmed up."""
    model, length = setting.model, setting.base.slots
    layers = range(model.geometry.n_layers)
    cells = keys(layers, over)

    def sweep(layers: Sequence[int] = layers) -> dict[Key, float]:
        grid = {"layer": layers, "slot": over}
        runs = (setting.base, setting.donor, setting.suffix)
        patched = patch_sweep(model, *runs, metric, grid, parts=("K", "V"), progress=False)
        return dict(zip(keys(layers, over), patched.values.tolist(), strict=True))

    sweep(layers[-1:])
    bridge = by_bridge(setting)
    batch = best_batch(bridge, over)
    between = evenly(layers, max(2, SAMPLED_TOKENS // length) + 2)[1:-1]
    sample: list[Key] = [
        (layer, PARTS[number % 2], slot) for number, layer in enumerate(between) for slot in evenly(over, batch)
    ]
    alone, together = (LIMITS.get((length, which), "") for which in ("alone", "batched"))
    contenders = [
        Contender("kvprobe, patch_sweep", len(cells), sweep),
        one_by_one("kvprobe, extend: a cell at a time", by_extend(setting), metric, cells[::STRIDE]),
        one_by_one("TransformerBridge: a cell at a time", bridge, metric, sample, alone),
        batched(f"TransformerBridge: {batch} cells a pass", bridge, metric, sample, together),
    ]
    try:
        traced = by_nnsight(setting)
    except ImportError:
        print("nnsight is not installed, so it is left out; pip install 'kvprobe[benchmark]' puts it in.")
        return contenders
    layer, part, slot = sample[0]
    traced(layer, part, [slot])
    return [*contenders, one_by_one("nnsight: a cell at a time", traced, metric, sample)]


def one_by_one(name: str, patch: Patch, metric: LogitDiff, cells: Sequence[Key], limit: str = "") -> Contender:
    """Each cell in a pass of its own."""

    def run() -> dict[Key, float]:
        return {(layer, part, slot): float(metric(patch(layer, part, [slot]))) for layer, part, slot in cells}

    return Contender(name, len(cells), run, limit)


def batched(name: str, patch: Patch, metric: LogitDiff, cells: Sequence[Key], limit: str = "") -> Contender:
    """All cells of one layer and part in one pass."""
    groups = dict.fromkeys((layer, part) for layer, part, _ in cells)

    def run() -> dict[Key, float]:
        values = {}
        for layer, part in groups:
            slots = [slot for other, which, slot in cells if (other, which) == (layer, part)]
            logits = patch(layer, part, slots)
            values |= {(layer, part, slot): float(metric(row[None])) for slot, row in zip(slots, logits, strict=True)}
        return values

    return Contender(name, len(cells), run, limit)


def best_batch(patch: Patch, slots: Sequence[int]) -> int:
    """The cells to a pass that cost least per cell; a batch clearly slower than a smaller one ends the search."""
    patch(0, "K", slots[:1])
    best, least = 1, float("inf")
    for batch in BATCHES:
        start = time.perf_counter()
        patch(0, "K", evenly(slots, batch))
        taken = (time.perf_counter() - start) / batch
        if taken > 1.1 * least:
            break
        if taken < least:
            best, least = batch, taken
    return best


def rounds(contenders: Sequence[Contender], repeats: int, rate: Callable[[], float]) -> list[float]:
    """Time all contenders `repeats` times, each round beginning with another; the matmul rate of each round."""
    rates = []
    for number in range(repeats):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            before = rate() if contender is contenders[0] else 0.0
            start = time.perf_counter()
            contender.values = contender.run()
            contender.seconds.append(time.perf_counter() - start)
            if contender is contenders[0]:
                rates.append((before + rate()) / 2)
    return rates


def table(model: kv.Model, length: int, contenders: Sequence[Contender], slots: Sequence[int]) -> None:
    threads = torch.get_num_threads()
    print(
        f"\n{model.name}, fp32, {threads} threads; {length} tokens, a suffix of {SUFFIX}; "
        f"a map of {model.geometry.n_layers} layers × {len(slots)} slots × {{K, V}}"
    )
    print(f"{'':40}{'cells':>8}{'seconds':>10}{'ms a cell':>12}{'× sweep':>10}  at least")
    ours = contenders[0]
    for contender in contenders:
        ratio = statistics.median(
            (theirs / contender.cells) / (seconds / ours.cells)
            for theirs, seconds in zip(contender.seconds, ours.seconds, strict=True)
        )
        seconds, per_cell = statistics.median(contender.seconds), 1e3 * contender.per_cell
        print(f"{contender.name:40}{contender.cells:8}{seconds:10.1f}{per_cell:12.1f}{ratio:10.1f}  {contender.limit}")


def flops(model: kv.Model, length: int) -> float:
    """The least work of a cell, on average over layers: from the patched layer on, the products of the suffix's tokens
    with the weights and with the slots; and one token's logits."""
    shape, network = model.geometry, model.lanes.plain
    weights = sum(parameter.numel() for parameter in network.model.layers[0].parameters())
    attention = 2 * shape.n_heads * shape.d_head * (length + SUFFIX)
    layers = (shape.n_layers + 1) / 2
    return 2 * SUFFIX * layers * (weights + attention) + 2 * network.lm_head.weight.numel()


def matmul_rate(model: kv.Model, times: int = 50) -> float:
    """FLOP/s of torch.mm at the shape of the MLP, with as many rows as a full pass of the sweep has."""
    config = model.lanes.plain.config
    hidden, weight = (
        torch.rand(ROWS * SUFFIX, config.hidden_size),
        torch.rand(config.hidden_size, config.intermediate_size),
    )
    torch.mm(hidden, weight)
    start = time.perf_counter()
    for _ in range(times):
        torch.mm(hidden, weight)
    return times * 2 * hidden.numel() * weight.shape[1] / (time.perf_counter() - start)


def memory(name: str, length: int, slots: int) -> None:
    """Print how far one sweep over every layer, with both prompts' caches, raises the peak above the weights."""
    model = kv.load(name, device="cpu", dtype="float32")
    Setting.drawn(model, 8, SUFFIX)
    loaded = psutil.Process().memory_info().rss
    setting = Setting.drawn(model, length, SUFFIX)
    grid = {"layer": None, "slot": evenly(range(length), slots)}
    patched = patch_sweep(model, setting.base, setting.donor, setting.suffix, furthest(setting), grid, parts=("KV",))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(
        f"memory: a sweep of {len(patched.cells)} cells ({model.geometry.n_layers} layers × {len(grid['slot'])} slots "
        f"of K and V) at {length} tokens peaks {(peak - loaded) / 2**30:.2f} GiB above the {loaded / 2**30:.2f} GiB "
        "of the loaded model; at most 2",
        flush=True,
    )


def furthest(setting: Setting) -> LogitDiff:
    """The logit difference that the donor's whole cache moves most."""
    base, donor = (setting.model.extend(cache, setting.suffix)[1][0, -1] for cache in (setting.base, setting.donor))
    return LogitDiff(int((base - donor).argmax()), int((base - donor).argmin()))


def keys(layers: Sequence[int], slots: Sequence[int]) -> list[Key]:
    """The map's cells in its own order."""
    return [(layer, part, slot) for layer in layers for slot in slots for part in PARTS]


def evenly(of: Sequence[int], count: int) -> list[int]:
    """This many of them, the first and the last among them."""
    count = min(count, len(of))
    return [of[round(at * (len(of) - 1) / max(count - 1, 1))] for at in range(count)]


if __name__ == "__main__":
    main()
