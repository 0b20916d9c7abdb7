"""In which ways caches are computed, as far as that says how two of them may differ."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
Coarse = Literal["llama.cpp f32", "llama.cpp f16", "llama.cpp q8_0", "llama.cpp q4_0"]
"""Engines that round more than the numbers of their caches say: llama.cpp with weights in 4 bits, by the type of its
cache."""
Engine = Literal["vLLM", Coarse]
"""An engine whose caches were measured to differ from those of transformers; that of vLLM are in the precision of their
numbers."""
Computed = Literal[Dtype, "vLLM float32", "vLLM bfloat16", Coarse]
"""How a cache was computed: in a dtype, by transformers or by an engine that was not measured; or by an engine, in a
dtype where it is not `Coarse`."""
STEPS: Mapping[Computed, float] = {
    "float32": 2**-23,
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "vLLM float32": 2**-23,
    "vLLM bfloat16": 2**-7,
    "llama.cpp f32": 2**-23,
    "llama.cpp f16": 2**-10,
    "llama.cpp q8_0": 2**-7,
    "llama.cpp q4_0": 2**-3,
}
"""Between neighbouring numbers, relative."""
IN_DTYPES: Mapping[tuple[Engine | None, Dtype], Computed] = {
    ("vLLM", "float32"): "vLLM float32",
    ("vLLM", "bfloat16"): "vLLM bfloat16",
}
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
COARSE: tuple[Coarse, ...] = ("llama.cpp f32", "llama.cpp f16", "llama.cpp q8_0", "llama.cpp q4_0")
ENGINES: tuple[Engine, ...] = ("vLLM", *COARSE)
"""From the one that rounds least."""


def coarsest(engines: Iterable[Engine | None]) -> Engine | None:
    """That of several which rounds most; None where there is none."""
    known: list[Engine] = [engine for engine in engines if engine is not None]
    return max(known, key=ENGINES.index) if known else None


def engine_in(words: str) -> Engine | None:
    """The engine that words name: of llama.cpp with the coarsest type of a cache among them, f16 where there is none;
    of several the coarsest."""
    if "llama.cpp" in words:
        return coarsest(name for name in COARSE if re.search(rf"\b{name.split()[1]}\b", words)) or "llama.cpp f16"
    return "vLLM" if re.search(r"\bvllm\b", words, re.IGNORECASE) else None
