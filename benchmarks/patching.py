"""A map of patched cells with kvprobe, beside the libraries that a user would pick instead: same cells, same results.

kvprobe sweeps the whole map, layer × slot × {K, V}. The others take seconds for a cell, at any layer, so they are timed
on a sample of it. What they compute is in `patched_forward.py`. Each round begins with another contender, and a ratio
is one of the times of a cell. The sweep's peak of memory is measured in a process of its own.

    python benchmarks/patching.py
"""

import resource
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from patched_forward import Part, Patch, Setting, by_bridge, by_extend, by_nnsight
from timing import Row, clock, main

import kvprobe as kv
from kvprobe.patching import LogitDiff, patch_sweep
from kvprobe.patching.rows import ROWS

SUFFIX = 6
PARTS: tuple[Part, ...] = ("K", "V")
BATCHES = (2, 4, 8, 16)
SAMPLED_TOKENS = 2048
"""Tokens of all prompts that the others read in a round, at most; with longer prompts they read fewer cells."""
STRIDE = 61
"""The step at which cells of the map are read by `extend` too; prime, so that all layers, slots and parts occur."""
BOUND = 1e-3
"""Values may differ by this share of the largest effect on the map."""
LIMITS = {(512, "alone"): 1 / 60, (512, "batched"): 1 / 30, (2048, "alone"): 1 / 150}
MOST_BYTES = 2 * 2**30

Key = tuple[int, Part, int]
"""Layer, part and slot of a cell."""
Cells = Sequence[Key]


@dataclass
class Contender:
    """One way to patch these cells: seconds of each round, and the metric of each cell."""

    name: str
    cells: int
    run: Callable[[], dict[Key, float]]
    most: float | None = None
    seconds: list[float] = field(default_factory=list)
    values: dict[Key, float] = field(default_factory=dict)

    @property
    def per_cell(self) -> list[float]:
        """Seconds of a cell in each round."""
        return [seconds / self.cells for seconds in self.seconds]


def measure(asked: Namespace) -> Iterator[Row]:
    lengths, slots = ((64,), 4) if asked.quick else ((128, 512, 2048), 60)
    # A process of its own, and before this one grows: Linux counts a child's peak from its parent's.
    command = [sys.executable, __file__, asked.model, str(max(lengths)), str(slots)]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    what = f"peak of a sweep over {slots} slots, {max(lengths):,} tokens"
    yield Row.of(what, "2 GiB", [peak], [MOST_BYTES], unit="B", most=1, note="above the loaded model")
    model = kv.load(asked.model, device="cpu", dtype="float32")
    for length in lengths:
        yield from compare(model, length, slots, asked.repeats)


def compare(model: kv.Model, length: int, slots: int, repeats: int) -> Iterator[Row]:
    """Every contender on this length, whose values are asserted to be equal, and the floor."""
    setting = Setting.drawn(model, length, SUFFIX)
    metric, over = furthest(setting), evenly(range(length), slots)
    contenders = all_contenders(setting, metric, over)
    ours = contenders[0]
    rates = rounds(contenders, repeats, rate=lambda: matmul_rate(model))

    clean = float(metric(model.extend(setting.base, setting.suffix)[1][0]))
    effect = max(abs(value - clean) for value in ours.values.values())
    what = f"a patched cell, {length:,} tokens"
    for contender in contenders[1:]:
        gap = max(abs(value - ours.values[key]) for key, value in contender.values.items())
        allowed = BOUND * effect
        assert gap <= allowed, f"{contender.name} is {gap:.1e} from the sweep, where {allowed:.1e} is allowed"
        note = f"{contender.cells} of {ours.cells} cells; values within {gap:.0e} of {effect:.2f}"
        yield Row.of(what, contender.name, ours.per_cell, contender.per_cell, most=contender.most, note=note)
    if len(contenders) < ALL:
        yield Row(what, "nnsight", note=MISSING)
    work = flops(model, length)
    note = f"{work / 1e9:.2f} GFLOP at the rate of torch.mm"
    yield Row.of(what, "the arithmetic alone", ours.per_cell, [work / rate for rate in rates], note=note)


ALL, MISSING = 5, "not installed: `make bench` installs it, or pip install nnsight"


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
    between = evenly(layers, min(8, max(2, SAMPLED_TOKENS // length)) + 2)[1:-1]
    sample: list[Key] = [
        (layer, PARTS[number % 2], slot) for number, layer in enumerate(between) for slot in evenly(over, batch)
    ]
    alone, together = (LIMITS.get((length, which)) for which in ("alone", "batched"))
    contenders = [
        Contender("kvprobe, patch_sweep", len(cells), sweep),
        one_by_one("kvprobe, extend: a cell at a time", by_extend(setting), metric, cells[::STRIDE]),
        one_by_one("TransformerBridge: a cell at a time", bridge, metric, sample, alone),
        batched(f"TransformerBridge: {batch} cells a pass", bridge, metric, sample, together),
    ]
    try:
        traced = by_nnsight(setting)
    except ImportError:
        return contenders
    layer, part, slot = sample[0]
    traced(layer, part, [slot])
    return [*contenders, one_by_one("nnsight: a cell at a time", traced, metric, sample)]


def one_by_one(
    name: str, patch: Patch, metric: LogitDiff, cells: Sequence[Key], most: float | None = None
) -> Contender:
    """Each cell in a pass of its own."""

    def run() -> dict[Key, float]:
        return {(layer, part, slot): float(metric(patch(layer, part, [slot]))) for layer, part, slot in cells}

    return Contender(name, len(cells), run, most)


def batched(name: str, patch: Patch, metric: LogitDiff, cells: Cells, most: float | None = None) -> Contender:
    """All cells of one layer and part in one pass."""
    groups: dict[tuple[int, Part], None] = dict.fromkeys((layer, part) for layer, part, _ in cells)

    def run() -> dict[Key, float]:
        values: dict[Key, float] = {}
        for layer, part in groups:
            slots = [slot for other, which, slot in cells if (other, which) == (layer, part)]
            logits = patch(layer, part, slots)
            values |= {(layer, part, slot): float(metric(row[None])) for slot, row in zip(slots, logits, strict=True)}
        return values

    return Contender(name, len(cells), run, most)


def best_batch(patch: Patch, slots: Sequence[int]) -> int:
    """The cells to a pass that cost least per cell; a batch clearly slower than a smaller one ends the search."""
    patch(0, "K", slots[:1])
    best, least = 1, float("inf")
    for batch in BATCHES:
        start = clock()
        patch(0, "K", evenly(slots, batch))
        taken = (clock() - start) / batch
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
            start = clock()
            contender.values = contender.run()
            contender.seconds.append(clock() - start)
            if contender is contenders[0]:
                rates.append((before + rate()) / 2)
    return rates


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
    start = clock()
    for _ in range(times):
        torch.mm(hidden, weight)
    return times * 2 * hidden.numel() * weight.shape[1] / (clock() - start)


def memory(name: str, length: int, slots: int) -> None:
    """Print by how many bytes a sweep over every layer, with both prompts' caches, raises the peak."""
    model = kv.load(name, device="cpu", dtype="float32")
    Setting.drawn(model, 8, SUFFIX)
    loaded = psutil.Process().memory_info().rss
    setting = Setting.drawn(model, length, SUFFIX)
    grid = {"layer": None, "slot": evenly(range(length), slots)}
    runs = (setting.base, setting.donor, setting.suffix)
    patch_sweep(model, *runs, furthest(setting), grid, parts=("KV",), progress=False)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(peak - loaded)


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
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):  # a process of its own
        memory(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(measure, __doc__, repeats=2)
