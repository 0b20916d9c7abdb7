"""A budget as a table for people, and as numbers for programs."""

from collections.abc import Iterator

from kvprobe.memory.needs import Needs
from kvprobe.names import number_ranges
from kvprobe.units import both, short

ENGINES = {"hf": "transformers", "vllm": "vLLM", "logical": "logical view"}
"""The engines' names in prose."""


def lines(budget: Needs) -> Iterator[str]:
    """The budget, line by line."""
    request = budget.request
    name, parameters = f"{budget.config.name}: {budget.config.kind}", f"{_parameters(budget.parameters)} parameters"
    active = "" if budget.active == budget.parameters else f", {_parameters(budget.active)} active for a token"
    yield f"{name}, {len(budget.layers)} layers, {parameters}{active}"
    yield (
        f"{request.batch:,} × {request.context:,} tokens ({request.prompt:,} read, {request.new:,} generated); "
        f"weights and activations {request.dtype.name}, cache {request.numbers.name}; {_how(budget)}"
    )
    yield ""
    yield f"{'layers':16}{'what each stores':34}{'B/token':>10}{'logical':>12}{'allocated':>12}"
    for numbers, kind, per_token, logical, allocated in rows(budget):
        yield f"{numbers:16}{kind:34}{per_token:>10,}{short(logical):>12}{short(allocated):>12}"
    padding = budget.cache - sum(budget.allocated)
    if padding:
        yield f"{'padding':72}{short(padding):>12}"
    logical, allocated = short(sum(budget.logical)), short(budget.cache)
    yield f"{'all layers':50}{sum(budget.bytes_per_token):>10,}{logical:>12}{allocated:>12}"
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


def parts(budget: Needs) -> list[tuple[str, int]]:
    """The bytes of the peak, by what they are for."""
    phase = budget.phases[budget.phase]
    when = {
        "reading": "while the prompt is read",
        "generating": "at the last token",
        "on the way": "at its fullest",
        "held": "",
    }[budget.phase]
    ranks = f" on one of {budget.blocks.ranks} ranks" if budget.blocks.ranks > 1 else ""
    beside = (
        ("activations", phase.activations),
        ("logits", phase.logits),
        ("a layer's cache, twice while it grows", phase.growth),
    )
    return [
        (f"weights{ranks}", budget.weights),
        (f"cache {when}".strip(), phase.cache),
        *((name, size) for name, size in beside if size),
        ("peak", budget.peak),
    ]


def rows(budget: Needs) -> list[tuple[str, str, int, int, int]]:
    """For each kind of layer: which layers, what they store, and the bytes of all per token, logical and allocated."""
    alike: dict[tuple[str, int, int, int], list[int]] = {}
    for number, layer in enumerate(budget.layers):
        key = (str(layer), budget.bytes_per_token[number], budget.logical[number], budget.allocated[number])
        alike.setdefault(key, []).append(number)
    return [
        (_ranges(numbers), f"{count} × {kind}", count * per_token, count * logical, count * allocated)
        for (kind, per_token, logical, allocated), numbers in alike.items()
        for count in [len(numbers)]
    ]


def as_mapping(budget: Needs) -> dict[str, object]:
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
        "writes_per_token": sum(budget.writes_per_token),
        "peak": budget.peak,
        "moment": budget.phase,
        "moments": {name: vars(phase) for name, phase in budget.phases.items()},
        "memory": budget.memory,
        "usable": budget.usable,
        "headroom": budget.headroom,
        "largest_context": budget.largest_context,
        "largest_new": budget.largest_new,
        "largest_batch": budget.largest_batch,
        "layers": [
            {
                "keeps": str(layer),
                "bytes_per_token": per_token,
                "writes_per_token": writes,
                "logical": logical,
                "allocated": allocated,
            }
            for layer, per_token, writes, logical, allocated in zip(
                budget.layers,
                budget.bytes_per_token,
                budget.writes_per_token,
                budget.logical,
                budget.allocated,
                strict=True,
            )
        ],
    }


def _how(budget: Needs) -> str:
    name = ENGINES[budget.engine]
    if budget.engine == "vllm":
        name += f", blocks of {budget.blocks.block}"
    if budget.engine == "hf":
        name += f", {budget.kernel} attention"
    return name if budget.request.plan.name == "none" else f"{name}, {budget.request.plan.name}"


def _room(budget: Needs) -> Iterator[str]:
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
    return "no limit" if number is None else f"{number:,} {unit}"


def _saving(budget: Needs) -> Iterator[str]:
    """What the policy and the format save, each against the same without it."""
    request = budget.request
    if request.plan.name != "none":
        yield _saved(request.plan.name, budget, budget.without_policy)
    if request.numbers != request.dtype:
        yield _saved(f"A cache of {request.numbers.name}", budget, budget.without_format)


def _saved(what: str, budget: Needs, before: Needs) -> str:
    verb, sign = ("saves", 1) if budget.cache <= before.cache else ("costs", -1)
    size, peak = sign * (before.cache - budget.cache), sign * (before.peak - budget.peak)
    share = f"{100 * size / before.cache:.1f} % of {short(before.cache)}" if before.cache else "of nothing"
    return f"{what} {verb} {short(size)} of cache ({share}) and {short(peak)} at the peak."


def _remarks(budget: Needs) -> Iterator[str]:
    request = budget.request
    trained = budget.trained_context
    if trained is not None and request.context > trained:
        yield f"The model was trained for {trained:,} tokens; {request.context:,} are more."
    if (
        trained is not None
        and budget.largest_context is not None
        and budget.largest_context > trained >= request.context
    ):
        yield f"The model was trained for {trained:,} tokens; there is room for more."
    if not (budget.config.has("dtype") or budget.config.has("torch_dtype")) and request.dtype.name == "bfloat16":
        yield "The config has no dtype; bfloat16 is assumed unless dtype says otherwise."
    if (
        budget.engine == "hf"
        and request.new == 0
        and any(layer.attention and layer.attention.reach for layer in budget.layers)
    ):
        yield (
            "After the prompt, transformers holds all of it in sliding layers too; it frees slots beyond the window "
            "when the next token is read."
        )
    if written := sorted({size for size in budget.writes_per_token if size}):
        count, total = sum(map(bool, budget.writes_per_token)), sum(budget.writes_per_token)
        yield (
            f"kvprobe's own caches keep what each token writes to the states of {count} layers, so that it can be "
            f"hidden: {' or '.join(f'{size:,}' for size in written)} B per token and layer, "
            f"{short(total * request.batch * request.context)} here."
        )
    if budget.assumed:
        sizes = ", ".join(f"{name}={size}" for name, size in budget.assumed.items())
        yield f"The config leaves out {sizes}, which is what transformers' configuration class has."
    crossing = sum(layer.attention is not None and layer.attention.crosses for layer in budget.layers)
    if crossing and not request.source:
        yield f"{crossing} layers attend to another input, which has no tokens here; set their number with source."
    if not budget.widths.exact and budget.engine == "hf":
        yield "Activations are an estimate for this family; weights and caches are exact."
        if any(layer.state is not None and layer.state.recurrent for layer in budget.layers):
            yield "It assumes fused recurrent kernels; without them, transformers needs several times as much."
    if budget.engine == "vllm":
        yield "Activations are an estimate for vLLM; CUDA graphs and the memory of its libraries are not counted."
        if budget.blocks.ranks > 1:
            yield (
                "Weights are divided evenly over ranks here; what every rank stores whole, such as norms and latent "
                "projections, comes on top."
            )


def _ranges(numbers: list[int]) -> str:
    """`0–4, 6–10, …`."""
    text = number_ranges(numbers)
    return text if len(text) <= 14 else f"{', '.join(text.split(', ')[:2])}, …"[:15]
