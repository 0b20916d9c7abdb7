"""Memory that a model really takes while it reads and generates, beside its budget.

On the CPU, torch's profiler reports every allocation to the byte, including the scratch memory of kernels. On a GPU,
the allocator reports its peak, in rounded blocks. Neither sees memory that libraries take outside torch.
"""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import QuantizedCache

from kvprobe.arguments import checked_arguments
from kvprobe.brief import Brief
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.memory.budget import Budget
from kvprobe.models.attending import attention_named
from kvprobe.models.hf_cache import CACHE, library_cache
from kvprobe.models.loading import free_bytes
from kvprobe.models.placing import use_quanto_uncompiled
from kvprobe.restoring import restoring
from kvprobe.units import both


@dataclass(frozen=True)
class MeasuredPhase:
    """Bytes beside the weights during one pass.

    Attributes:
        cache: bytes of the cache's tensors after it.
        peak: the most bytes at once, including those from before it.
    """

    cache: int
    peak: int


@dataclass(frozen=True, repr=False)
class Measured(Brief):
    """Memory that one run of a model took.

    Attributes:
        budget: the prediction.
        weights: bytes of the parameters.
        reading: the pass that reads the prompt.
        generating: the last pass that reads a generated token; None if there was none.
    """

    budget: Budget
    weights: int
    reading: MeasuredPhase
    generating: MeasuredPhase | None

    @property
    def peak(self) -> int:
        """The most bytes at once, weights included."""
        phases = [self.reading, *([self.generating] if self.generating else [])]
        return self.weights + max(phase.peak for phase in phases)

    @property
    def cache(self) -> int:
        """Bytes of the cache at the end."""
        return (self.generating or self.reading).cache

    def as_mapping(self) -> dict[str, int]:
        """The measured bytes, by name."""
        last = {} if self.generating is None else {"generating": self.generating.peak}
        return {"weights": self.weights, "cache": self.cache, "reading": self.reading.peak, **last, "peak": self.peak}

    def _html(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def rows(self) -> list[tuple[str, int, int]]:
        """Bytes predicted and measured: of the weights, the cache in the end, beside the weights while the prompt is
        read and (if there was one) at the last generated token, and at the peak."""
        budget = self.budget
        rows = [("weights", budget.weights, self.weights), ("cache", budget.cache, self.cache)]
        rows += [("reading", budget.phases["reading"].total, self.reading.peak)]
        if self.generating is not None:
            rows += [("generating", budget.phases["generating"].total, self.generating.peak)]
        return [*rows, ("peak", budget.peak, self.peak)]

    def __str__(self) -> str:
        lines = [f"{'measured':34}{'predicted':>26}{'measured':>26}{'off by':>10}"]
        for name, predicted, measured in self.rows():
            error = 100 * (predicted / measured - 1)
            lines.append(f"{_WRITTEN.get(name, name):34}{both(predicted):>26}{both(measured):>26}{error:>+8.2f} %")
        return "\n".join(lines)


_WRITTEN = {
    "cache": "cache in the end",
    "reading": "beside the weights, reading",
    "generating": "beside the weights, last token",
}


def measurable(budget: Budget) -> None:
    """Refuse a budget that cannot be measured, before a model is loaded.

    Raises:
        UserError: the budget is not one of transformers' own caches.
    """
    if budget.engine != "hf" or budget.request.plan.name != "none":
        raise UserError("Only transformers' own caches are measured; use engine='hf' and no policy.")
    if budget.request.source:
        raise UserError("Cross-attention is not measured; leave source out.")


@checked_arguments
def measure(model: Model, budget: Budget) -> Measured:
    """Read a prompt of random tokens and generate, as transformers does, and count the bytes that it takes.

    Raises:
        UserError: the budget is not one of transformers' own caches, is of another dtype than the loaded model, or is
            larger than the free memory.
    """
    _refuse(model, budget)
    request, device, plain = budget.request, model.lanes.device, model.lanes.plain
    ids = torch.randint(
        0, budget.widths.vocabulary, (request.batch, request.context), generator=torch.Generator().manual_seed(0)
    ).to(device)
    keep = 1 if budget.logits == "last" else 0
    past = _empty_cache(plain, budget)

    def run_model(first: int, last: int) -> None:
        plain(ids[:, first:last], use_cache=True, logits_to_keep=keep, **{CACHE: past})

    passes = [(0, request.prompt), *((step, step + 1) for step in range(request.prompt, request.context))]
    with torch.inference_mode(), attention_named(plain, budget.kernel):
        reading = _measured_phase([lambda: run_model(*passes[0])], lambda: past, device)
        generating = None
        if request.new:
            if request.new == 1:
                past = _empty_cache(plain, budget)
            for first, last in passes[1:-2]:
                run_model(first, last)
            # The pass before the last allocates what the last one frees, so it must be inside the measurement.
            generating = _measured_phase(
                [lambda: run_model(*passes[-2]), lambda: run_model(*passes[-1])], lambda: past, device
            )
    storages = [parameter.untyped_storage() for parameter in plain.parameters()]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return Measured(budget, sum(weights.values()), reading, generating)


def storage_bytes(past: Cache) -> list[int]:
    """Bytes of each layer's tensors in a transformers cache; storage that views share counts once."""
    return [sum(_storages(layer).values()) for layer in past.layers]


_HELD = ("keys", "values", "indexer_keys", "conv_states", "recurrent_states", "_quantized_keys", "_quantized_values")


def _storages(value: object) -> dict[int, int]:
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if type(value) is not torch.Tensor and flatten is not None:
            # A quantised tensor consists of other tensors.
            return _storages([getattr(value, name) for name in flatten()[0]])
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    parts: list[object]
    if isinstance(value, dict):
        parts = [*value.values()]
    elif isinstance(value, list | tuple):
        parts = [*value]
    else:
        parts = [getattr(value, name, None) for name in _HELD]
    storages: dict[int, int] = {}
    for part in parts:
        storages |= _storages(part) if part is not None else {}
    return storages


def _measured_phase(runs: list[Callable[[], None]], past: Callable[[], Cache], device: torch.device) -> MeasuredPhase:
    """Run these, and return the bytes of the last one."""
    return _on_gpu(runs, past, device) if device.type == "cuda" else _on_cpu(runs, past)


def _on_gpu(runs: list[Callable[[], None]], past: Callable[[], Cache], device: torch.device) -> MeasuredPhase:
    for run in runs[:-1]:
        run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, cached = torch.cuda.memory_allocated(device), sum(storage_bytes(past()))
    runs[-1]()
    torch.cuda.synchronize(device)
    return MeasuredPhase(sum(storage_bytes(past())), cached + torch.cuda.max_memory_allocated(device) - before)


def _on_cpu(runs: list[Callable[[], None]], past: Callable[[], Cache]) -> MeasuredPhase:
    from torch.profiler import ProfilerActivity, profile, record_function

    with _silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for run in runs[:-1]:
            run()
        cached = sum(storage_bytes(past()))
        with record_function(_LAST):
            runs[-1]()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = results.events()
    start = next(event.start_ns() for event in events if event.name() == _LAST)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for time, change in changes:
        if time >= start:
            now += change
            most = max(most, now)
    return MeasuredPhase(sum(storage_bytes(past())), cached + most)


@contextmanager
def _silenced() -> Generator[None]:
    """While this lasts, nothing is written to standard error: the profiler logs its start and stop there."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with Path(os.devnull).open("w") as devnull, os.fdopen(stderr, "w"), restoring(lambda: os.dup2(stderr, 2)):
        os.dup2(devnull.fileno(), 2)
        yield


_LAST = "kvprobe: the pass that is measured"


def _empty_cache(model: PreTrainedModel, budget: Budget) -> Cache:
    name = budget.request.numbers.name
    if budget.request.numbers.is_plain:
        return library_cache(model.config)
    if name == "fp8":
        return QuantizedCache("fp8", model.config)
    use_quanto_uncompiled()
    return QuantizedCache("quanto", model.config, nbits=budget.request.numbers.bits)


def _refuse(model: Model, budget: Budget) -> None:
    lanes = model.lanes
    measurable(budget)
    if lanes.dtype != getattr(torch, budget.request.dtype.name):
        raise UserError(
            f"The budget is of {budget.request.dtype.name}, but the model was loaded as "
            f"{str(lanes.dtype).removeprefix('torch.')}; give both the same dtype."
        )
    free = free_bytes(lanes.device)
    needed = budget.phases[budget.phase].total
    if needed > free:
        raise UserError(
            f"{budget.request.batch} × {budget.request.context} tokens need {both(needed)} beside the weights, but "
            f"{both(free)} are free on {lanes.device}; measure a shorter context."
        )
