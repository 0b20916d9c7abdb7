"""Each conversation is read with many secrets, forgets them in each way, and what is left is asked for.

A probe that knows the conversation reads all slots that stay, of one part of one layer: it learns from other secrets
of this conversation. An attacker who tries the secrets one by one is given a cache that was computed in other
portions, which rounds otherwise. The model itself is asked for the secret, and other questions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import WRITES, recurrent
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.forgetting.readers import FOLDS, SecretReading, read_by_probes
from kvprobe.forgetting.trace import INPUTS, STATE
from kvprobe.forgetting.use import Answers, answers, exchange
from kvprobe.forgetting.views import rotated
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.states import inputs_of, state_of
from kvprobe.studies.forgetting import Config
from kvprobe.studies.forgetting.cases import Drawn, cases, draw
from kvprobe.studies.forgetting.replies import GivenReply, read_with, replies_to
from kvprobe.studies.forgetting.ways import (
    ALL,
    BACKWARD,
    CLEAN,
    CLOSED,
    ERASED,
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
    erased = [f"{ERASED} {slots}" for slots in config.erased]
    return (NOTHING, ERRATUM, *fitted, *erased, STEERED, ZERO, MASK, EVICT, CLOSED, OTHER, *windows, *CLEAN)


def reference(way: str) -> str:
    """The way that reads the same text anew at the same positions: with a gap where a way keeps one."""
    if way.startswith(OTHER):
        return ALL
    return RESTART if way in (CLOSED, RESTART) else PLACED


def holds(way: str) -> str | None:
    """The way whose slots a way leaves as they are, and to which it adds others: it is done for the secrets that are
    asked alone, and what is read in the slots of the other way is the least that it leaves."""
    if way == ERRATUM:
        return NOTHING
    return EVICT if way.startswith((MATCHED, ERASED)) else None


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """A row per conversation and way.

    Columns: `sample`, `kind`, `way`; `differs` (whether a number that later tokens see depends on the secret) and
    `spread` (the largest standard deviation over secrets, relative to its layer's size); `read` (places of the secret
    that a probe reads), `bits` (read, as a share of all), `whole` (secrets of which it reads every place), `tried`
    (found by trying), each but the bits with what one gets who knows nothing: `chance`, `chance_whole`, `chance_tried`;
    `use` (nats that exchanging the cache takes from the secret as an answer) and `said`; `tokens` read again, `flops`
    and `time` (seconds, for one secret); `kl`, `same` and `cosine` of other replies beside the same text read anew at
    the same positions, `restarted` and `moved` (KL from a restart without a gap, and from everything in view); `apart`
    (how far the batch is from the way done by itself); `decided` (where as many slots are read again with another
    secret in the place of the first: answers that are decided as if all had been). See `holds` for ways that are read
    in the slots of others.
    """
    numbers = range(len(config.kinds) * config.conversations)
    for number in numbers:  # before anything is measured, so that a tokenizer that does not fit is refused at once
        drawn_case(model, config, number)
    return Parts(model, config, run).table(measure, numbers, "ways", doing="Forgetting", unit="conversation")


def drawn_case(model: Model, config: Config, number: int) -> Drawn:
    """A conversation with its secrets. All kinds come in turn, so that an interrupted run has some of each."""
    of_kind, kind = divmod(number, len(config.kinds))
    case = cases(config.kinds[kind], of_kind + 1, model.tokenizer, config.seed)[-1]
    rng = np.random.default_rng([config.seed, number])
    return draw(case, config.secrets, config.asked, model.tokenizer, rng)


def measure(model: Model, config: Config, number: int) -> Iterator[dict[str, Any]]:
    """The rows of one conversation."""
    drawn = drawn_case(model, config, number)
    rng = np.random.default_rng([config.seed, number, 1])
    every = ForgettingSession.of(model, drawn, config.steps)
    again = [every.read_otherwise(row) for row in drawn.asked]
    folds = torch.from_numpy(rng.permutation(np.arange(config.secrets) % FOLDS))
    others = OtherReplies.of(every, config.reply)
    decided = _decided(every.some(drawn.asked), config.windows)
    readings: dict[str, dict[str, float]] = {}
    for way in ways(config):
        few, read_in = holds(way) is not None, holds(way) or way
        session = every.some(drawn.asked) if few else every
        left, seconds = _timed(session, way)
        left = model.as_seen(left)
        if read_in not in readings:
            cache = model.as_seen(every.after(read_in)) if few else left
            readings[read_in] = _left(
                model, cache, [model.as_seen(twin.after(read_in)) for twin in again], drawn, folds
            )
        if way.startswith(ERASED):  # one row after the other, and for long
            one, seconds = left.rows([0]), seconds / left.batch
        else:
            one, seconds = _timed(session.row(0), way)
        tokens, after = reread(session, way, one)
        yield {
            "sample": drawn.case.id,
            "kind": drawn.case.kind,
            "way": way,
            **readings[read_in],
            **_used(model, left, session.drawn),
            **others.under(left.rows([0]), reference(way)),
            "tokens": tokens,
            "flops": flops(model, tokens, after) * (BACKWARD if way.startswith(ERASED) else 1),
            "time": seconds,
            "apart": _apart(left.rows([0]), model.as_seen(one)),
            "kept": float(drawn.case.keeps(drawn.secrets)),
            "decided": decided.get(way, float("nan")),
        }


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
            yield (layer, INPUTS), inputs_of(model, cache, layer).flatten(1)
        live = cache.ledger.live[layer if len(cache.ledger.live) > 1 else 0][0].any(0)
        for name in [name for name in parts if name not in WRITES]:
            yield (layer, name), parts[name][:, :, live].float().cpu().flatten(1)


def _left(model: Model, left: KVCache, again: Sequence[KVCache], drawn: Drawn, folds: Tensor) -> dict[str, float]:
    """What can be read and found of the secrets in the caches that stay."""
    chances = {"chance": drawn.chance, "chance_whole": 1 / drawn.possible, "chance_tried": 1 / len(drawn.secrets)}
    # Of one cache for all secrets any reader has what guessing gives, exactly.
    guessed = {"read": drawn.chance, "bits": 0.0, "whole": 1 / drawn.possible, "tried": 1 / len(drawn.secrets)}
    nothing = {"differs": 0.0, "spread": 0.0, **guessed, **chances}
    if left.batch == 1:
        return nothing
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
        return nothing
    reading: SecretReading = read_by_probes(numbers, drawn.labels, folds, classes=drawn.case.classes)
    own = torch.tensor(drawn.asked)
    return chances | {
        "differs": 1.0,
        "spread": spread,
        "read": reading.digits.mean,
        "bits": reading.bits.mean / reading.held,
        "whole": reading.whole.mean,
        "tried": float((distances.argmin(1) == own).double().mean()),
    }


def _used(model: Model, left: KVCache, drawn: Drawn) -> dict[str, float]:
    """How much the model makes of the secret when it is asked for it."""
    asked = _asked(model, left, drawn)
    log_probs, said = (table.expand(len(drawn.asked), -1) for table in (asked.log_probs, asked.said))
    return {"use": exchange(log_probs.numpy()).mean, "said": float(said.diagonal().double().mean())}


def _asked(model: Model, left: KVCache, drawn: Drawn) -> Answers:
    """The secrets that are asked, as answers under their own caches, or under the one for all of them."""
    case = drawn.case
    caches = [left.rows([row]) for row in drawn.asked] if left.batch > 1 else [left]
    return answers(model, caches, [case.answer(drawn.secrets[row]) for row in drawn.asked], case.ask, case.lead)


def _decided(session: ForgettingSession, windows: Sequence[int]) -> dict[str, float]:
    """By the way that reads as many slots again: where a secret is put in another's place, the share of them after
    which the same secret is the likeliest answer as where all was read with it."""
    caches = {NOTHING: session.former} | {window(slots): session.edited(slots) for slots in (0, *windows)}
    model, drawn = session.model, session.drawn
    chosen = {way: _asked(model, model.as_seen(cache), drawn).log_probs.argmax(1) for way, cache in caches.items()}
    anew = _asked(model, session.full, drawn).log_probs.argmax(1)
    return {way: float((answer == anew).double().mean()) for way, answer in chosen.items()}


def _apart(batch: KVCache, alone: KVCache) -> float:
    """How far a way for many secrets is from the same way done for one, relative to a layer's size."""
    pairs = zip(batch.tensors, alone.tensors, strict=True)
    return max(float((one - two).abs().max() / two.square().mean().sqrt().clamp(min=1e-30)) for one, two in pairs)


@dataclass(frozen=True)
class OtherReplies:
    """Replies to other questions: what each token of them was, and its distribution, under the caches that other ways
    are held against."""

    model: Model
    replies: tuple[GivenReply, ...]
    logits: Mapping[str, Float[Tensor, "tokens vocab"]]

    @classmethod
    def of(cls, session: ForgettingSession, count: int) -> "OtherReplies":
        """Those that a restart gives."""
        model, one = session.model, session.row(0)
        caches = {way: model.as_seen(one.after(way)) for way in (NOTHING, *CLEAN)}
        bare = cls(model, replies_to(model, caches[RESTART], UNRELATED, count), {})
        return cls(model, bare.replies, {way: bare.read(cache) for way, cache in caches.items()})

    def read(self, cache: KVCache) -> Float[Tensor, "tokens vocab"]:
        """The logits of each token of the replies after a cache, the true ones before it given."""
        rows = read_with(self.model, cache, self.replies)
        logits = self.model.extend(cache, rows, logits=len(self.replies[0].ids))[1]
        return logits.float().flatten(0, 1)

    def under(self, cache: KVCache, true: str) -> dict[str, float]:
        """How they change under a cache beside the same text read anew, and beside everything in view."""
        logits, wanted = self.read(cache), self.logits[true]
        kl, same = divergence(wanted, logits)
        cosine = torch.nn.functional.cosine_similarity(wanted, logits, dim=-1)
        return {
            "kl": float(kl.mean()),
            "same": float(same.double().mean()),
            "cosine": float(cosine.mean()),
            "restarted": float(divergence(self.logits[RESTART], logits)[0].mean()),
            "moved": float(divergence(self.logits[NOTHING], logits)[0].mean()),
        }
