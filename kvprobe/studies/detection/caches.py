"""The caches of a prompt that detectors are asked about: sound ones, made in other ways, and wrong ones of the zoo."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvprobe.cache.cache import KVCache
from kvprobe.detection.zoo import ZOO, Planted, plant
from kvprobe.errors import UserError
from kvprobe.faults import Draws, FaultContext, Fp8Scale, PositionShift, QuantisationNoise
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import prepare
from kvprobe.inference.trials import donors, unrelated
from kvprobe.studies.detection import Size
from kvprobe.text.tokens import Tokens

SIZES: dict[Size, dict[str, int]] = {
    "spot": {"blocks": 1, "layers": 1},
    "block": {"blocks": 1, "layers": 10**6},
    "layer": {"blocks": 10**6, "layers": 1},
    "reported": {},
}


@dataclass(frozen=True, eq=False)
class AskedCache:
    """A cache that detectors are asked about.

    Attributes:
        name: of the bug, or how a sound cache was made.
        size: of the bug; empty for sound caches.
        planted: the bug; None for sound caches.
    """

    cache: KVCache
    name: str
    size: str = ""
    planted: Planted | None = None


def sound_caches(model: Model, tokens: Tokens, start: KVCache, number: int) -> Iterator[AskedCache]:
    """The cache of these tokens, made in other ways."""
    half = len(tokens) // 2
    yield AskedCache(model.extend(model.prefill([tokens[:half]]), [tokens[half:]])[0], "chunks")
    beside = unrelated(model.tokenizer, len(tokens) + 9, number)
    batch = model.prefill([tokens, beside]).rows([0])
    yield AskedCache(batch.evict(slots=batch.ledger.padding), "batch")
    yield AskedCache(model.prefill([tokens], lane="hooked"), "eager")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        layers = ({part: held.to(dtype) for part, held in layer.items()} for layer in start.layers)
        yield AskedCache(replace(start, layers=tuple(layers)), name)
    yield AskedCache(plant("vllm-39146", start, draws=Draws(sample=number)).cache, "vllm-39146")
    yield AskedCache(start.corrupt(QuantisationNoise(8)), "int8")
    yield AskedCache(start.corrupt(Fp8Scale(1.0)), "fp8")


def wrong_caches(
    model: Model, tokens: Tokens, start: KVCache, number: int, seed: int, bugs: Sequence[str], sizes: Sequence[Size]
) -> Iterator[AskedCache]:
    """The cache of these tokens with each bug in each size; without those that change nothing in it."""
    context = context_of(model, tokens, start, number)
    for place, name in enumerate(bugs or [name for name, report in ZOO.items() if not report.benign]):
        for repeat, size in enumerate(sizes):
            draws = Draws(seed, number, place * len(SIZES) + repeat)
            try:
                planted = plant(name, start, context, draws=draws, **SIZES[size])
            except UserError:  # it changes nothing here, or strikes what the model does not store; counted in conclude
                continue
            yield AskedCache(planted.cache, name, size, planted)


def context_of(model: Model, tokens: Tokens, start: KVCache, number: int) -> FaultContext:
    """What bugs need of a prompt's cache."""
    return prepare(model.lanes, start, [PositionShift(1)], donors(model, tokens, number, {"distractor"}))
