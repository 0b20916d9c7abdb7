"""Each conversation is read in each engine, a turn is taken out of its cache in several ways, its fact is asked for.

In all engines the conversation is read first, then its cache is edited, and then the question is read from it. In
llama.cpp a cache is edited in its saved slot, but for `SHIFTED`, which llama.cpp does by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.engines.llamacpp import from_slot, to_slot
from kvprobe.engines.server import CacheType, Completion, LlamaServer, served
from kvprobe.engines.slot import read_slot
from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.work import kept
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.studies.engines import Config, LlamaKind
from kvprobe.studies.engines.files import files
from kvprobe.tasks.facts import Fact, FactPair, facts, pairs_in_turn
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import Rows, chosen

HERE = "transformers"
HIDDEN, OTHER = "fact", "T1"
"""The turn that holds the fact, and one that does not."""
FULL, CONTROL, MASKED, CLOSED, SHIFTED, NAIVE, RESTART = (
    "full",
    "control",
    "masked",
    "re-indexed",
    "shifted",
    "naive",
    "restart",
)
"""Everything in view; another turn masked; the turn masked; evicted and re-indexed; forgotten by llama.cpp's own
context shift; evicted and re-indexed without rotating keys; the visible text read anew."""
PAIRS = {
    "price": (RESTART, MASKED),
    "memory": (RESTART, CLOSED),
    "positions": (CLOSED, MASKED),
    "bug": (CLOSED, NAIVE),
    "hiding": (FULL, MASKED),
    "control": (FULL, CONTROL),
    "rounding": (CLOSED, SHIFTED),
}
"""Conditions between which KL is measured within one engine. Those of `rounding` are equal but for it."""
LLAMA: Mapping[LlamaKind, tuple[bool, CacheType, bool]] = {
    "exact": (True, "f32", False),
    "f32": (False, "f32", False),
    "f16": (False, "f16", True),
    "q8_0": (False, "q8_0", True),
}
"""Whether weights are in float32, the type of the cache, and whether attention is flash attention, which rounds."""
STEP = 256
"""llama.cpp rounds the size of a slot up to a multiple of it."""


@dataclass(frozen=True)
class SaidNext:
    """What an engine makes of the question under one condition.

    Attributes:
        logs: log-probabilities of the next token.
        text: the question, the beginning of the reply, and how the engine goes on.
    """

    logs: Float[Tensor, "vocab"]
    text: str


class GGUFWeights(NamedTuple):
    """What llama.cpp reads.

    Attributes:
        folder: goes with the last of its users.
        paths: of the weights as they are, and under True in float32.
    """

    folder: TemporaryDirectory[str]
    paths: Mapping[bool, Path]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows, both by `sample`, `kind` and `engine`.

    `samples`, by `condition`: the `margin` of the fact over a stand-in (nats), whether the fact is in the reply
    (`answered`), `kl` from transformers, whether the likeliest token is the same (`agrees`), and of `SHIFTED` how far
    K and V are `off` those of `CLOSED`. `pairs`, by `pair`: `kl` between two conditions of the engine.
    """
    asked = facts(config.kinds, config.prompts)
    pairs = [*zip(asked, pairs_in_turn(asked, model.tokenizer, config.seed), strict=True)]
    doing, unit = "Asking both engines", "conversation"
    if run.workers is None:
        weights(config)  # written once for all processes that are forked
    table = Parts(model, config, run).table(measure, pairs, "engines", doing=doing, unit=unit)
    read: Rows = chosen(table, {"pair": ""})
    differ: Rows = chosen(table, {"pair": tuple(PAIRS)})
    return {
        "samples": read.drop(columns="pair").reset_index(drop=True),
        "pairs": differ[["sample", "kind", "engine", "pair", "kl"]].reset_index(drop=True),
    }


@kept
def weights(config: Config) -> GGUFWeights:
    """The files of this machine, which are deleted with what was made of them."""
    folder = TemporaryDirectory(prefix="kvprobe-gguf-")
    return GGUFWeights(folder, files(config, Path(folder.name)))


def measure(model: Model, config: Config, case: tuple[Fact, FactPair]) -> pd.DataFrame:
    """The rows of one conversation."""
    rows = rows_by_engine(model, config, *case, weights(config).paths)
    return pd.DataFrame(list(rows)).assign(sample=case[1].id, kind=case[1].kind)


def rows_by_engine(
    model: Model, config: Config, fact: Fact, pair: FactPair, of_weights: Mapping[bool, Path]
) -> Iterator[dict[str, Any]]:
    """What both engines say of one conversation."""
    value = fact.values[pair.number % 2]
    here = read_here(model, pair, config.reply)
    yield from rows_of(HERE, here, here, pair, value)
    for engine in config.engines:
        exact, cache, flash = LLAMA[engine]
        size = STEP * -(-(len(pair.prompts[0]) + len(pair.suffix) + config.reply + 1) // STEP)
        threads = torch.get_num_threads()
        with served(of_weights[exact], cache=cache, context=size, threads=threads, flash=flash, shift=True) as server:
            said, off = read_there(model, server, size, pair, config.reply)
        yield from rows_of(engine, said, here, pair, value, off)


def rows_of(
    engine: str,
    said: Mapping[str, SaidNext],
    here: Mapping[str, SaidNext],
    pair: FactPair,
    value: str,
    off: float = np.nan,
) -> Iterator[dict[str, Any]]:
    """The rows of one conversation in one engine."""
    right, wrong = pair.answers
    for condition, one in said.items():
        true = here[CLOSED if condition == SHIFTED else condition].logs
        yield {
            "engine": engine,
            "condition": condition,
            "pair": "",
            "margin": float(one.logs[right] - one.logs[wrong]),
            "answered": float(value in one.text),
            "kl": np.nan if engine == HERE else between(true, one.logs),
            "agrees": np.nan if engine == HERE else float(true.argmax() == one.logs.argmax()),
            "off": off if condition == SHIFTED else np.nan,
        }
    for name, (first, second) in PAIRS.items():
        if second in said:
            yield {"engine": engine, "pair": name, "kl": between(said[first].logs, said[second].logs)}


def between(one: Float[Tensor, "vocab"], other: Float[Tensor, "vocab"]) -> float:
    """KL, in nats."""
    return float(relative_entropy(one, other).clamp(min=0))  # rounding can leave a 0 below 0


def visible(pair: FactPair) -> tuple[int, ...]:
    """The tokens of a conversation without the turn."""
    ids, hidden = pair.prompts[0].ids, pair.prompts[0].span(HIDDEN)
    return (*ids[: hidden.start], *ids[hidden.stop :])


def edited(full: KVCache) -> dict[str, KVCache]:
    """The cache of a conversation under the conditions that edit it."""
    return {
        CONTROL: full.mask(OTHER),
        MASKED: full.mask(HIDDEN),
        CLOSED: full.evict(HIDDEN).reindex(),
        NAIVE: full.evict(HIDDEN).reindex("naive"),
    }


def read_here(model: Model, pair: FactPair, count: int) -> dict[str, SaidNext]:
    """What transformers says, by condition."""
    full = model.prefill(pair.prompts[0])
    caches = {FULL: full, **edited(full), RESTART: model.prefill(Tokens.of(visible(pair)))}
    rows = KVCache.join(list(caches.values()))
    asked = onwards(rows, [pair.suffix] * len(caches))
    logs = model.extend(rows, asked, logits=1)[1][:, -1].double().log_softmax(-1).cpu()
    replies = generate(model.lanes, asked, rows, max_new_tokens=count, stop=()).tokens
    texts = [model.tokenizer.decode([*pair.suffix.ids, *reply]) for reply in replies]
    return {condition: SaidNext(logs[row], texts[row]) for row, condition in enumerate(caches)}


def read_there(
    model: Model, server: LlamaServer, size: int, pair: FactPair, count: int
) -> tuple[dict[str, SaidNext], float]:
    """What llama.cpp says, by condition; and how far its own shift is from kvprobe's."""
    prompt, suffix, kept = pair.prompts[0], pair.suffix.ids, [*visible(pair)]
    said: dict[str, SaidNext] = {}

    def keep(condition: str, ids: Sequence[int], answer: Completion) -> None:
        reply = server.complete(ids, count)
        for one in (answer, reply):
            _refuse_read_again(one, len(ids) - len(suffix))
        logs = answer.log_probabilities[0]
        by_token = torch.tensor([logs[token] for token in range(len(logs))], dtype=torch.double)
        said[condition] = SaidNext(by_token, model.tokenizer.decode([*suffix, *reply.tokens]))

    server.complete([*prompt.ids], reuse=False)
    server.save(0, FULL)
    like = server.path(FULL)
    full = from_slot(like, model, prompt)
    caches = edited(full)
    for condition, cache in ({FULL: full} | caches).items():
        slot = to_slot(cache, server.path(condition), like, model) if condition != FULL else read_slot(like)
        ids = [*slot.tokens, *suffix]
        keep(condition, ids, server.go_on(condition, ids, n_probs="all"))
    server.complete(kept, reuse=False)
    keep(RESTART, [*kept, *suffix], server.complete([*kept, *suffix], n_probs="all"))

    hidden, filler = prompt.span(HIDDEN), [token for token in prompt.ids if token != suffix[0]]
    fill = [filler[place % len(filler)] for place in range(size - 1 - len(prompt))]
    server.complete([*prompt.ids, *fill], 2, reuse=False, forget=(hidden.start, hidden.stop - hidden.start))
    server.save(0, SHIFTED)
    off = farthest(model.as_seen(caches[CLOSED]), from_slot(server.path(SHIFTED), model))
    answer = server.complete([*kept, *suffix], n_probs="all")
    keep(SHIFTED, [*kept, *suffix], answer)
    return said, off


def _refuse_read_again(answer: Completion, kept: int) -> None:
    if answer.reused < kept:
        raise UserError(
            f"llama.cpp used {answer.reused} of the {kept} tokens whose cache was edited and read the others again, so "
            "what was edited is lost; this version keeps or shifts caches in another way than kvprobe knows."
        )


def farthest(cache: KVCache, other: KVCache) -> float:
    """How far K or V of another cache, which may go on after it, is off at the most, relative to a layer's length."""
    return max(
        float((two[part][:, :, : cache.slots] - one[part]).norm() / one[part].norm())
        for one, two in zip(cache.layers, other.layers, strict=True)
        for part in ("K", "V")
    )
