"""In which ways caches are computed, as far as that says how two of them may differ."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

Engine = Literal["llama.cpp f32", "llama.cpp f16", "llama.cpp q8_0", "llama.cpp q4_0"]
"""An engine that rounds more than its numbers say: llama.cpp with weights in 4 bits, by the type of its cache."""
Computed = Literal["float32", "bfloat16", "float16", Engine]
"""How a cache was computed: in a dtype, by transformers or by an engine that rounds no more than it does, such as vLLM;
or by an `Engine`."""
STEPS: Mapping[Computed, float] = {
    "float32": 2**-23,
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "llama.cpp f32": 2**-23,
    "llama.cpp f16": 2**-10,
    "llama.cpp q8_0": 2**-7,
    "llama.cpp q4_0": 2**-3,
}
"""Between neighbouring numbers, relative."""
ENGINES: tuple[Engine, ...] = ("llama.cpp f32", "llama.cpp f16", "llama.cpp q8_0", "llama.cpp q4_0")


def coarsest(engines: Iterable[Engine | None]) -> Engine | None:
    """That of several which rounds most; None where there is none."""
    known: list[Engine] = [engine for engine in engines if engine is not None]
    return max(known, key=_step) if known else None


def engine_in(words: str) -> Engine | None:
    """The engine that words name: the coarsest type of a cache among them, f16 where there is none."""
    if "llama.cpp" not in words:
        return None
    return coarsest(name for name in ENGINES if re.search(rf"\b{name.split()[1]}\b", words)) or "llama.cpp f16"


def _step(engine: Engine) -> float:
    return STEPS[engine]
