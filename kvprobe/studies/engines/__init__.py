"""Does llama.cpp do with an edited cache what transformers does?"""

from dataclasses import dataclass
from typing import Literal

from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.studies.settings import FACT_KINDS, FACTS_OF_A_KIND, FactKind

LlamaKind = Literal["exact", "f32", "f16", "q8_0"]
"""llama.cpp with the weights and the cache in f32, so that it rounds as transformers does; or with the weights as they
are in their file, and the cache in one of three types."""


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the engines study.

    Attributes:
        kinds: of conversations, by the fact that is asked for.
        prompts: conversations of each kind.
        engines: exact (weights and cache in f32), or the type of the cache beside the weights as they are in their
            file: f32, f16, q8_0. transformers is always there.
        reply: tokens of the reply in which the fact is looked for.
        gguf: the model's GGUF file; by default that of a named model, which is fetched again.
        seed: of which value of a fact is the true one.
    """

    kinds: tuple[FactKind, ...] = FACT_KINDS
    prompts: int = ranged(4, 1, FACTS_OF_A_KIND)
    engines: tuple[LlamaKind, ...] = ("exact", "f16", "q8_0")
    reply: int = ranged(8, 1, 64)
    gguf: str = ""


run = STUDIES["engines"].run
