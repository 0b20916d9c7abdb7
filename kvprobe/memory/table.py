"""A budget as a person reads it, and as a program does."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvprobe.memory.units import both, short

if TYPE_CHECKING:
    from kvprobe.memory.budget import Budget

ENGINES = {"hf": "transformers", "vllm": "vLLM", "logical": "logical view"}
"""What the engines are called."""


def lines(budget: "Budget") -> Iterator[str]:
    """The budget, line by line."""
    request = budget.request
    active = "" if budget.active == budget.parameters else f", {_parameters(budget.active)} active for a token"
    yield (
        f"{budget.config.name}: {budget.config.kind}, {len(budget.layers)} layers, {_parameters(budget.parameters)} parameters{active}"
    )
    yield (
        f"{request.batch:,} × {request.context:,} tokens ({request.prompt:,} read, {request.new:,} generated); weights and "
        f"activations {request.dtype.name}, cache {request.numbers.name}; {_how(budget)}"
    )
    yield ""
    yield f"{'layers':16}{'what each keeps':34}{'B/token':>10}{'logical':>12}{'allocated':>12}"
    for numbers, kind, per_token, held, allocated in rows(budget):
        yield f"{numbers:16}{kind:34}{per_token:>10,}{short(held):>12}{short(allocated):>12}"
    padding = budget.cache - sum(budget.allocated)
    if padding:
        yield f"{'padding':72}{short(padding):>12}"
    yield f"{'all layers':50}{sum(budget.bytes_per_token):>10,}{short(sum(budget.logical)):>12}{short(budget.cache):>12}"
    yield ""
    for name, size in parts(budget):
        yield f"{name:44}{both(size):>28}"
    yield ""
    yield from _room(budget)
    yield from _saving(budget)
    yield from _remarks(budget)


def _parameters(count: int) -> str:
    size, unit = (1e9, "B") if count >= 1e9 else (1e6, "M")
    return f"{count / size:.3g} {unit}"


def parts(budget: "Budget") -> list[tuple[str, int]]:
    """The bytes of the peak, by what they are for."""
    moment = budget.moments[budget.moment]
    when = {
        "reading": "while the prompt is read",
        "generating": "at the last token",
        "on the way": "at its fullest",
        "held": "",
    }[budget.moment]
    ranks = f" on one of {budget.blocks.ranks} ranks" if budget.blocks.ranks > 1 else ""
    found = [(f"weights{ranks}", budget.weights), (f"cache {when}".strip(), moment.cache)]
    found += [("activations", moment.activations)] if moment.activations else []
    found += [("logits", moment.logits)] if moment.logits else []
    found += [("a layer's cache, twice while it grows", moment.growth)] if moment.growth else []
    return [*found, ("peak", budget.peak)]


def rows(budget: "Budget") -> list[tuple[str, str, int, int, int]]:
    """Layers that are alike, each kind once: which, what they keep, and their bytes in all."""
    found: dict[tuple[str, int, int, int], list[int]] = {}
    for number, layer in enumerate(budget.layers):
        key = (str(layer), budget.bytes_per_token[number], budget.logical[number], budget.allocated[number])
        found.setdefault(key, []).append(number)
    return [
        (
            _ranges(numbers),
            f"{len(numbers)} × {kind}",
            len(numbers) * each,
            len(numbers) * held,
            len(numbers) * allocated,
        )
        for (kind, each, held, allocated), numbers in found.items()
    ]


def as_mapping(budget: "Budget") -> dict[str, Any]:
    """The budget in numbers: bytes throughout."""
    request = budget.request
    return {
        "model": budget.config.name,
        "family": budget.config.kind,
        "parameters": budget.parameters,
        "active": budget.active,
        "engine": budget.engine,
        "prompt": request.prompt,
        "new": request.new,
        "batch": request.batch,
        "dtype": request.dtype.name,
        "cache_dtype": request.numbers.name,
        "policy": request.plan.name,
        "weights": budget.weights,
        "bytes_per_token": sum(budget.bytes_per_token),
        "logical": sum(budget.logical),
        "allocated": budget.cache,
        "peak": budget.peak,
        "moment": budget.moment,
        "moments": {
            name: {"cache": each.cache, "activations": each.activations, "logits": each.logits, "growth": each.growth}
            for name, each in budget.moments.items()
        },
        "memory": budget.memory,
        "usable": budget.usable,
        "headroom": budget.headroom,
        "largest_context": budget.largest_context,
        "largest_new": budget.largest_new,
        "largest_batch": budget.largest_batch,
        "layers": [
            {"keeps": str(layer), "bytes_per_token": per_token, "logical": held, "allocated": allocated}
            for layer, per_token, held, allocated in zip(
                budget.layers, budget.bytes_per_token, budget.logical, budget.allocated, strict=True
            )
        ],
    }


def _how(budget: "Budget") -> str:
    name = ENGINES[budget.engine]
    if budget.engine == "vllm":
        name += f", blocks of {budget.blocks.block}"
    if budget.engine == "hf":
        name += f", {budget.kernel} attention"
    return name if budget.request.plan.name == "none" else f"{name}, {budget.request.plan.name}"


def _room(budget: "Budget") -> Iterator[str]:
    if budget.memory is None or budget.usable is None or budget.headroom is None:
        return
    share = "" if budget.usable == budget.memory else f", of which vLLM takes {short(budget.usable)}"
    fits = "headroom" if budget.headroom >= 0 else "DOES NOT FIT: short of"
    yield f"{'memory':44}{both(budget.memory):>28}{share}"
    yield f"{fits:44}{both(abs(budget.headroom)):>28}"
    request = budget.request
    yield f"{'largest context':44}{_count(budget.largest_context, 'tokens'):>28} for a batch of {request.batch:,}"
    yield f"{'most generated':44}{_count(budget.largest_new, 'tokens'):>28} after a prompt of {request.prompt:,}"
    yield f"{'largest batch':44}{_count(budget.largest_batch, 'at once'):>28} of {request.context:,} tokens"
    yield ""


def _count(number: int | None, unit: str) -> str:
    return "no end" if number is None else f"{number:,} {unit}"


def _saving(budget: "Budget") -> Iterator[str]:
    """What the policy and the format save, each against the same without it."""
    request = budget.request
    if request.plan.name != "none":
        yield _saved(request.plan.name, budget, budget.without_policy)
    if request.numbers != request.dtype:
        yield _saved(f"A cache of {request.numbers.name}", budget, budget.without_format)


def _saved(what: str, budget: "Budget", before: "Budget") -> str:
    verb = "saves" if budget.cache <= before.cache else "costs"
    size = abs(before.cache - budget.cache)
    share = f"{100 * size / before.cache:.1f} % of {short(before.cache)}" if before.cache else "of nothing"
    return f"{what} {verb} {short(size)} of cache ({share}) and {short(before.peak - budget.peak)} at the peak."


def _remarks(budget: "Budget") -> Iterator[str]:
    request = budget.request
    trained = budget.trained_context
    if trained is not None and request.context > trained:
        yield f"The model was made for {trained:,} tokens; {request.context:,} are more."
    if (
        trained is not None
        and budget.largest_context is not None
        and budget.largest_context > trained >= request.context
    ):
        yield f"The model was made for {trained:,} tokens; there is room for more."
    if not (budget.config.has("dtype") or budget.config.has("torch_dtype")) and request.dtype.name == "bfloat16":
        yield "The config names no dtype; bfloat16 is taken unless dtype says otherwise."
    if (
        budget.engine == "hf"
        and request.new == 0
        and any(layer.attention and layer.attention.reach for layer in budget.layers)
    ):
        yield (
            "After the prompt, transformers holds all of it in sliding layers too; their slots beyond the window are let go "
            "when the next token is read."
        )
    crossing = sum(layer.attention is not None and layer.attention.crosses for layer in budget.layers)
    if crossing and not request.source:
        yield f"{crossing} layers attend to another input, of which there are no tokens here; say how many with source."
    if not budget.widths.exact and budget.engine == "hf":
        yield "Activations are an estimate for this family; weights and caches are exact."
        if any(layer.state is not None and layer.state.recurrent for layer in budget.layers):
            yield "They are those of fused recurrent kernels; without these, transformers needs several times as much."
    if budget.engine == "vllm":
        yield "Activations are an estimate for vLLM; CUDA graphs and what its libraries hold are not counted."
        if budget.blocks.ranks > 1:
            yield "Weights are shared out evenly here; what each rank keeps whole, such as norms and latent projections, comes on top."


def _ranges(numbers: list[int]) -> str:
    """`0–4, 6–10, …`."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    text = ", ".join(runs)
    return text if len(text) <= 14 else f"{', '.join(runs[:2])}, …"[:15]
