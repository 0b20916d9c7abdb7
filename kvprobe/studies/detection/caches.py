"""The caches of a prompt that detectors are asked about: sound ones, made in other ways, and wrong ones of the zoo."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from kvprobe.cache.cache import KVCache
from kvprobe.detection.zoo import BLOCK, ZOO, Planted, plant
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
DRAWN = 4
"""Places that are drawn for a bug until it changes something."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class AskedCache:
    """A cache that detectors are asked about.

    Attributes:
        name: of the bug, or how a sound cache was made.
        size: of the bug; empty for sound caches.
        base: how the cache was made in which the bug is.
        planted: the bug; None for sound caches.
    """

    cache: KVCache
    name: str
    size: str = ""
    base: str = ""
    planted: Planted | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.size

    @property
    def blocks(self) -> range:
        """Those that the bug strikes, from the first to the last."""
        slots = self.planted.slots if self.planted else ()
        return range(slots[0] // BLOCK, slots[-1] // BLOCK + 1) if slots else range(0)


def other_ways(model: Model, tokens: Tokens, start: KVCache, number: int) -> dict[str, KVCache]:
    """The cache of these tokens, computed in other ways; `same` is the cache itself."""
    half = len(tokens) // 2
    batch = model.prefill([tokens, unrelated(model.tokenizer, len(tokens) + 9, number)]).rows([0])
    return {
        "same": start,
        "chunks": model.extend(model.prefill([tokens[:half]]), [tokens[half:]])[0],
        "batch": batch.evict(slots=batch.ledger.padding),
        "eager": model.prefill([tokens], lane="hooked"),
    }


def sound_caches(start: KVCache, ways: Mapping[str, KVCache], number: int) -> Iterator[AskedCache]:
    """Caches in which nothing is wrong: computed in other ways, or stored in other types."""
    for name, cache in ways.items():
        if name != "same":
            yield AskedCache(cache, name)
    for name in HALVES:
        yield AskedCache(stored(start, name), name)
    rounded = plant("vllm-39146", start, draws=Draws(sample=number)).cache
    yield AskedCache(stored(rounded, "bf16"), "vllm-39146")
    yield AskedCache(start.corrupt(QuantisationNoise(8)), "int8")
    yield AskedCache(start.corrupt(Fp8Scale(1.0)), "fp8")


def wrong_caches(
    model: Model,
    tokens: Tokens,
    ways: Mapping[str, KVCache],
    number: int,
    seed: int,
    bugs: Sequence[str],
    sizes: Sequence[Size],
) -> Iterator[AskedCache]:
    """The cache of these tokens with each bug in each size, in turn in caches that were computed or stored otherwise;
    without those that change nothing in it wherever they are drawn."""
    context = context_of(model, tokens, ways["same"], number)
    bases = [*ways, *HALVES]
    for place, name in enumerate(bugs or [name for name, report in ZOO.items() if not report.benign]):
        for repeat, size in enumerate(sizes):
            base = bases[(number + place + repeat) % len(bases)]
            for draw in range(DRAWN):
                draws = Draws(seed, number, place * len(SIZES) + repeat + draw * len(SIZES) * len(ZOO))
                # Refused where it changes nothing, or strikes what the model does not store; counted in conclude.
                with suppress(UserError):
                    planted = plant(name, ways.get(base, ways["same"]), context, draws=draws, **SIZES[size])
                    yield AskedCache(stored(planted.cache, base), name, size, base, planted)
                    break


def stored(cache: KVCache, name: str) -> KVCache:
    """The cache in this type, where it names one."""
    if name not in HALVES:
        return cache
    return replace(
        cache, layers=tuple({part: held.to(HALVES[name]) for part, held in layer.items()} for layer in cache.layers)
    )


def context_of(model: Model, tokens: Tokens, start: KVCache, number: int) -> FaultContext:
    """What bugs need of a prompt's cache."""
    return prepare(model.lanes, start, [PositionShift(1)], donors(model, tokens, number, {"distractor"}))
