"""Each conversation is read with many secrets, forgets them in each way, and what is left is asked for.

A probe that knows the conversation reads all slots that stay, of one part of one layer: it learns from other secrets
of this conversation. An attacker who tries the secrets one by one is given a cache that was computed in other
portions, which rounds otherwise. The model itself is asked for the secret, and other questions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import recurrent
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.forgetting.readers import FOLDS, SecretReading, read_by_probes, rotated
from kvprobe.forgetting.trace import INPUTS, STATE
from kvprobe.forgetting.use import answers, exchange
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.states import inputs_of, state_of
from kvprobe.studies.forgetting import Config
from kvprobe.studies.forgetting.cases import Drawn, ForgettingCase, cases, draw
from kvprobe.studies.forgetting.ways import (
    ALL,
    CLOSED,
    ERRATUM,
    EVICT,
    MASK,
    MATCHED,
    NOTHING,
    OTHER,
    PLACED,
    RESTART,
    STEERED,
    ZERO,
    ForgettingSession,
    flops,
    reread,
    window,
)
from kvprobe.text.tokens import GENERATED, Tokens

UNRELATED = (
    "What is the capital of Italy?",
    "How many days are there in a week?",
    "Write one sentence about the sea.",
    "What did I say first in this conversation?",
)
"""Questions on something else, asked after a way to forget."""


def ways(config: Config) -> tuple[str, ...]:
    """The ways to forget, from least to most that is read again."""
    windows = [window(slots) for slots in config.windows]
    fitted = [f"{MATCHED} {slots}" for slots in config.fitted]
    return (NOTHING, ERRATUM, *fitted, STEERED, ZERO, MASK, EVICT, CLOSED, OTHER, *windows, ALL, PLACED, RESTART)


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """A row per conversation and way.

    Columns: `sample`, `kind`, `way`; `differs` (whether a number that later tokens see depends on the secret) and
    `spread` (the largest standard deviation over secrets, relative to its layer's size); `read` (places of the secret
    that a probe reads), `chance`, `bits` (read, as a share of all), `whole` (secrets of which it reads every place);
    `tried` (found by trying); `use` (nats that exchanging the cache takes from the secret as an answer) and `said`;
    `tokens` read again, `flops` and `time` (seconds, for one secret); `kl`, `same` and `cosine` of other replies
    beside the same text read anew, `moved` (KL from everything in view); `apart` (how far the batch is from the way
    done by itself).
    """
    named = [case for kind in config.kinds for case in cases(kind, config.conversations, model.tokenizer, config.seed)]

    def measured(number: int) -> pd.DataFrame:
        return pd.DataFrame(measure(model, config, named[number], number)).assign(sample=named[number].id)

    return table_of_parts(run, range(len(named)), "ways", measured, doing="Forgetting", unit="conversation")


def measure(model: Model, config: Config, case: ForgettingCase, number: int) -> Iterator[dict[str, Any]]:
    """The rows of one conversation."""
    rng = np.random.default_rng([config.seed, number])
    drawn = draw(case, config.secrets, config.asked, model.tokenizer, rng)
    session = ForgettingSession.of(model, drawn)
    again = [session.read_otherwise(row) for row in drawn.asked]
    folds = torch.from_numpy(rng.permutation(np.arange(config.secrets) % FOLDS))
    same_text = len({session.kept("contiguous", row).ids for row in range(config.secrets)}) == 1
    others = OtherReplies.of(session, config.reply)
    for way in ways(config):
        left = _seen(model, session.after(way))
        one, seconds = _timed(session.row(0), way)
        tokens, after = reread(session, way, one)
        yield {
            "kind": case.kind,
            "way": way,
            **_left(model, left, [_seen(model, twin.after(way)) for twin in again], drawn, folds),
            **_used(model, left, drawn),
            **others.under(left.rows([0]), ALL if way.startswith(OTHER) else RESTART),
            "tokens": tokens,
            "flops": flops(model, tokens, after),
            "time": seconds,
            "apart": _apart(left.rows([0]), _seen(model, one)),
            "kept": float(same_text),
        }


def _seen(model: Model, cache: KVCache) -> KVCache:
    return model.as_seen(cache) if cache.ledger.rotated else cache


def _timed(session: ForgettingSession, way: str) -> tuple[KVCache, float]:
    """The way done for one secret, and the seconds that it takes."""
    began = perf_counter()
    cache = session.after(way)
    return cache, perf_counter() - began


def visible(model: Model, cache: KVCache) -> Iterator[tuple[tuple[int, str], Float[Tensor, "rows numbers"]]]:
    """What later tokens see of a cache, by layer and part."""
    for layer, parts in enumerate(cache.layers):
        if recurrent(parts):
            yield (layer, STATE), state_of(model, cache, layer).flatten(1)
            if "conv" in parts:
                yield (layer, INPUTS), inputs_of(model, cache, layer).flatten(1)
            continue
        live = cache.ledger.live[layer if len(cache.ledger.live) > 1 else 0][0].any(0)
        for name, held in parts.items():
            yield (layer, name), held[:, :, live].float().cpu().flatten(1)


def _left(model: Model, left: KVCache, again: Sequence[KVCache], drawn: Drawn, folds: Tensor) -> dict[str, float]:
    """What can be read and found of the secrets in the caches that stay."""
    labels, classes = drawn.labels, drawn.case.classes
    nothing = {"differs": 0.0, "spread": 0.0, "read": 1 / classes, "bits": 0.0, "whole": 0.0, "tried": 0.0}
    known = {"chance": 1 / classes, "blind": 1 / len(drawn.secrets)}
    if left.batch == 1:
        return nothing | known
    numbers: dict[tuple[int, str], Tensor] = {}
    distances, spread = torch.zeros(len(again), left.batch, dtype=torch.double), 0.0
    for (place, held), *twins in zip(visible(model, left), *(visible(model, one) for one in again), strict=True):
        varying = (held != held[:1]).any(0)
        numbers[place] = rotated(held)
        if not bool(varying.any()):
            continue
        few = held[:, varying]
        spread = max(spread, float(few.std(0).max() / held.square().mean().sqrt()))
        tried = torch.cat([twin[:, varying] for _, twin in twins]) - few[:1]
        distances += torch.cdist(tried.double(), (few - few[:1]).double()).square()
    if not spread:
        return nothing | known
    reading: SecretReading = read_by_probes(numbers, labels, folds, classes=classes)
    own = torch.tensor(drawn.asked)
    return known | {
        "differs": 1.0,
        "spread": spread,
        "read": reading.digits.mean,
        "bits": reading.bits.mean / log2(classes),
        "whole": reading.whole.mean,
        "tried": float((distances.argmin(1) == own).double().mean()),
    }


def _used(model: Model, left: KVCache, drawn: Drawn) -> dict[str, float]:
    """How much the model makes of the secret when it is asked for it."""
    case = drawn.case
    caches = [left.rows([row]) for row in drawn.asked] if left.batch > 1 else [left]
    texts = [case.answer(drawn.secrets[row]) for row in drawn.asked]
    asked = answers(model, caches, texts, case.ask, case.lead)
    table = asked.log_probs.expand(len(texts), -1).numpy()
    said = asked.said.double() if left.batch > 1 else asked.said.double() / len(texts)
    return {"use": exchange(table).mean, "said": float(said.mean())}


def _apart(batch: KVCache, alone: KVCache) -> float:
    """How far a way for many secrets is from the same way done for one, relative to a layer's size."""
    pairs = zip(batch.tensors, alone.tensors, strict=True)
    return max(float((one - two).abs().max() / two.square().mean().sqrt().clamp(min=1e-30)) for one, two in pairs)


@dataclass(frozen=True)
class OtherReplies:
    """Replies to other questions: what each token of them was, and its distribution, under the caches that other ways
    are held against."""

    model: Model
    replies: tuple[tuple[int, ...], ...]
    logits: Mapping[str, Float[Tensor, "tokens vocab"]]

    @classmethod
    def of(cls, session: ForgettingSession, count: int) -> "OtherReplies":
        """Those that a restart gives."""
        model, one = session.model, session.row(0)
        caches = {way: one.after(way) for way in (NOTHING, RESTART, ALL)}
        asked = [model.prompts(caches[RESTART], question)[0] for question in UNRELATED]
        replies = generate(model.lanes, asked, caches[RESTART].fork(len(asked)), max_new_tokens=count, stop=()).tokens
        bare = cls(model, tuple(map(tuple, replies)), {})
        return cls(model, bare.replies, {way: bare.read(_seen(model, cache)) for way, cache in caches.items()})

    def read(self, cache: KVCache) -> Float[Tensor, "tokens vocab"]:
        """The logits of each token of the replies after a cache, the true ones before it given."""
        rows: list[Tokens] = []
        for question, reply in zip(UNRELATED, self.replies, strict=True):
            prompt = self.model.prompts(cache, question)[0]
            rows.append(prompt + Tokens.of(reply[:-1], GENERATED, prompt.following))
        logits = self.model.extend(cache, rows, logits=len(self.replies[0]))[1]
        return logits.float().flatten(0, 1)

    def under(self, cache: KVCache, true: str) -> dict[str, float]:
        """How they change under a cache beside the same text read anew, and beside everything in view."""
        logits, reference = self.read(cache), self.logits[true]
        kl, same = divergence(reference, logits)
        cosine = torch.nn.functional.cosine_similarity(reference, logits, dim=-1)
        return {
            "kl": float(kl.mean()),
            "same": float(same.double().mean()),
            "cosine": float(cosine.mean()),
            "moved": float(divergence(self.logits[NOTHING], logits)[0].mean()),
        }
