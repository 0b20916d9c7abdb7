"""What a model really held while it read and generated, beside its budget.

On the CPU every allocation is counted as torch's profiler reports it, to the byte, the kernels' own scratch included;
on a GPU it is the allocator's peak, whose blocks are rounded up. What libraries take outside torch is in neither.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.memory.budget import Budget
from kvprobe.memory.units import both
from kvprobe.models.loading import free_bytes


@dataclass(frozen=True)
class Moment:
    """Bytes beside the weights, over one pass.

    Attributes:
        cache: that the cache's tensors hold after it.
        peak: the most that there was at once, what was there before it included.
    """

    cache: int
    peak: int


@dataclass(frozen=True)
class Measured:
    """What one run of a model held.

    Attributes:
        budget: what was predicted.
        weights: bytes of the parameters.
        reading: over the pass that reads the prompt.
        generating: over the last of the passes that read a generated token; None if there were none.
    """

    budget: Budget
    weights: int
    reading: Moment
    generating: Moment | None

    @property
    def peak(self) -> int:
        """Bytes at the worst moment, weights included."""
        moments = [self.reading, *([self.generating] if self.generating else [])]
        return self.weights + max(moment.peak for moment in moments)

    @property
    def cache(self) -> int:
        """Bytes of the cache in the end."""
        return (self.generating or self.reading).cache

    def as_mapping(self) -> dict[str, int]:
        """The measured bytes, by name."""
        last = {} if self.generating is None else {"generating": self.generating.peak}
        return {"weights": self.weights, "cache": self.cache, "reading": self.reading.peak, **last, "peak": self.peak}

    def __str__(self) -> str:
        budget = self.budget
        rows = [("weights", budget.weights, self.weights), ("cache in the end", budget.cache, self.cache)]
        rows += [("beside the weights, reading", budget.phases["reading"].total, self.reading.peak)]
        if self.generating is not None:
            rows += [("beside the weights, last token", budget.phases["generating"].total, self.generating.peak)]
        rows += [("peak", budget.peak, self.peak)]
        lines = [f"{'measured':34}{'predicted':>26}{'measured':>26}{'off by':>10}"]
        for name, predicted, found in rows:
            lines.append(f"{name:34}{both(predicted):>26}{both(found):>26}{100 * (predicted / found - 1):>+8.2f} %")
        return "\n".join(lines)


def measurable(budget: Budget) -> None:
    """Refuse what cannot be measured, before anything is loaded.

    Raises:
        UserError: the budget is not one of transformers' own caches.
    """
    if budget.engine != "hf" or budget.request.plan.name != "none":
        raise UserError("Only transformers' own caches are measured; use engine='hf' and no policy.")
    if budget.request.source:
        raise UserError("Cross-attention is not measured; leave source out.")


def measure(model: Model, budget: Budget) -> Measured:
    """Read a prompt of random tokens and generate, as transformers does, and count what is held.

    Raises:
        UserError: the budget is not one of transformers' own caches, or of another dtype than the loaded model.
        UserError: there is less memory free than the budget asks for.
    """
    _refuse(model, budget)
    request, device, plain = budget.request, model.lanes.device, model.lanes.plain
    ids = torch.randint(
        0, budget.widths.vocabulary, (request.batch, request.context), generator=torch.Generator().manual_seed(0)
    ).to(device)
    keep = 1 if budget.logits == "last" else 0
    past = _empty_cache(plain, budget)

    def read(first: int, last: int) -> None:
        plain(ids[:, first:last], past_key_values=past, use_cache=True, logits_to_keep=keep)

    passes = [(0, request.prompt), *((step, step + 1) for step in range(request.prompt, request.context))]
    with torch.inference_mode(), _kernel(plain, budget.kernel):
        reading = _moment([lambda: read(*passes[0])], lambda: past, device)
        generating = None
        if request.new:
            if request.new == 1:
                past = _empty_cache(plain, budget)
            for each in passes[1:-2]:
                read(*each)
            # The pass before the last makes anew what the last one frees, so that its freeing is seen.
            generating = _moment([lambda: read(*passes[-2]), lambda: read(*passes[-1])], lambda: past, device)
    weights = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain.parameters()}
    return Measured(budget, sum(weights.values()), reading, generating)


def storage_bytes(past: Any) -> list[int]:
    """Bytes that the tensors of each layer of a cache of transformers hold: of storage, which views share."""
    return [sum(_storages(layer).values()) for layer in past.layers]


_HELD = ("keys", "values", "indexer_keys", "conv_states", "recurrent_states", "_quantized_keys", "_quantized_values")


def _storages(value: Any) -> dict[int, int]:
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if type(value) is not torch.Tensor and flatten is not None:
            # A quantised tensor is made of others.
            return _storages([getattr(value, name) for name in flatten()[0]])
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        value = [getattr(value, name, None) for name in _HELD if value is not None]
    found: dict[int, int] = {}
    for each in value:
        found |= _storages(each) if each is not None else {}
    return found


def _moment(runs: list[Callable[[], None]], past: Callable[[], Any], device: torch.device) -> Moment:
    """Run these, and say what was held after the last and at most during it."""
    return _on_gpu(runs, past, device) if device.type == "cuda" else _on_cpu(runs, past)


def _on_gpu(runs: list[Callable[[], None]], past: Callable[[], Any], device: torch.device) -> Moment:
    for run in runs[:-1]:
        run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, held = torch.cuda.memory_allocated(device), sum(storage_bytes(past()))
    runs[-1]()
    torch.cuda.synchronize(device)
    return Moment(sum(storage_bytes(past())), held + torch.cuda.max_memory_allocated(device) - before)


def _on_cpu(runs: list[Callable[[], None]], past: Callable[[], Any]) -> Moment:
    from torch.profiler import ProfilerActivity, profile, record_function

    held = sum(storage_bytes(past()))
    with _unheard(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for run in runs[:-1]:
            run()
        held = sum(storage_bytes(past()))
        with record_function(_LAST):
            runs[-1]()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = results.events()
    start = next(event.start_ns() for event in events if event.name() == _LAST)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for moment, change in changes:
        if moment >= start:
            now += change
            most = max(most, now)
    return Moment(sum(storage_bytes(past())), held + most)


@contextmanager
def _unheard() -> Iterator[None]:
    """Keeps from the terminal what the profiler's own library says of its starting and stopping; errors are still raised."""
    sys.stderr.flush()
    terminal = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(nowhere)
        os.close(terminal)


_LAST = "kvprobe: the pass that is measured"


def _empty_cache(model: Any, budget: Budget) -> Any:
    from transformers import DynamicCache
    from transformers.cache_utils import QuantizedCache

    name = budget.request.numbers.name
    if budget.request.numbers.is_plain:
        return DynamicCache(config=model.config)
    if name == "fp8":
        return QuantizedCache("fp8", model.config)
    return QuantizedCache("quanto", model.config, nbits=budget.request.numbers.bits)


@contextmanager
def _kernel(model: Any, kernel: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(kernel)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _refuse(model: Model, budget: Budget) -> None:
    lanes = model.lanes
    measurable(budget)
    if lanes.dtype != getattr(torch, budget.request.dtype.name):
        raise UserError(
            f"The budget is of {budget.request.dtype.name} and the model was loaded as {str(lanes.dtype).removeprefix('torch.')}; "
            f"give both the same dtype."
        )
    free = free_bytes(lanes.device)
    needed = budget.phases[budget.phase].total
    if needed > free:
        raise UserError(
            f"{budget.request.batch} × {budget.request.context} tokens need {both(needed)} beside the weights, but {both(free)} are "
            f"free on {lanes.device}; measure a shorter context."
        )
