"""Each prompt's cache is made again in other ways, and damaged by each bug; and each detector scores each of them.

A detector's score is larger, the more it says that the cache is not the reference's. What it takes for wrong is decided
in `conclude`, from its scores on sound caches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.detection.clean import CleanRecipe, clean_of
from kvprobe.detection.zoo import BLOCK, ZOO
from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.sweep import first_divergence
from kvprobe.names import unknown
from kvprobe.studies.detection import Config
from kvprobe.studies.detection.caches import AskedCache, other_ways, sound_caches, wrong_caches
from kvprobe.studies.detection.inspectors import LARGEST, Cleans, inspected
from kvprobe.studies.detection.questions import QuestionedCaches
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import Item, Task, items_digest, prompt
from kvprobe.text.tokens import GENERATED, Tokens

CANARY_BLOCKS = 6
"""In the prompt of the canary, as in those of `kvprobe canary`."""
TOGETHER = 24
"""Caches that are read in one batch."""
LARGE = 1e9
"""No number of a sound cache is as large; caches that hold one are read one by one."""
LOUD = 99.0
"""The score where a number is not finite: there is no text."""


def inputs(config: Config) -> dict[str, str]:
    """A digest of the items.

    Raises:
        UserError: an unknown bug or task, or too few items.
    """
    for name in config.bugs:
        if name not in ZOO or ZOO[name].benign:
            known = [bug for bug, report in ZOO.items() if not report.benign]
            raise UserError(f"Setting 'bugs': {unknown('bug that is not benign', name, known)}")
    return {"tasks": items_digest([find_task(config.task)], config.samples + config.benign, config.seed)}


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """A row per prompt and cache. Prompts from `config.samples` on have sound caches only.

    Columns: `sample`, `bug` (or how a sound cache was made), `size` (empty for sound caches), `base` (how the cache was
    made in which the bug is), `kind`, `layer` (the first struck), `layers` (how many), `block` (the first struck),
    `blocks` (how many) and `slots` (of the prompt); `was_right` and `right` (the answer, from the reference and from
    this cache); the scores `text` (1 less the share of tokens before the first that differs), `surprise` (change of the
    mean surprise of the reference's tokens, nats), `logprob` (the largest change of the log-probability of one of
    them), `kl` (of the first, nats), `canary` (the farthest answer of a canary in whose cache the same was done, nats;
    missing where that changes nothing there) and `canary_right` (whether that was asked for a struck block), `hash`
    (whether a number differs), `diff` (the largest distance as a multiple of what is allowed) and `audit` (the largest
    surprise, likewise), with `…_layer` and `…_block` of the first place, `diff_kind`, and `diff_alarm` (its verdict).
    """
    items = find_task(config.task).items(config.samples + config.benign, config.seed)
    rounded = dict.fromkeys(sorted({*chain(*model.geometry.parts)} - {"decay"}), "e4m3")
    clean = Cleans(*(clean_of(model, replace(recipe(config.learnt), fp8=fp8)) for fp8 in ({}, rounded)))
    doing = "Planting and detecting"
    return Parts(model, config, run).table(measure, list(enumerate(items)), "caches", clean, doing=doing, unit="prompt")


def measure(model: Model, config: Config, case: tuple[int, Item], clean: Cleans) -> Iterator[dict[str, Any]]:
    """The rows of one prompt."""
    number, item = case
    tokens = prompt(item, model.tokenizer)
    read, last = tokens[:-1], tokens[-1:]
    start = model.prefill([read])
    asked = asked_of(model, config, read, start, number)
    canary = QuestionedCaches(model, CANARY_BLOCKS * BLOCK, BLOCK, number)
    asked_there = asked_of(model, config, canary.tokens, canary.start, number)
    answered = {one.key: answers(canary, one) for one in asked_there}
    reading = ReferenceReading(model, find_task(config.task), item, start, last, config.tokens)
    for first in range(0, len(asked), TOGETHER):
        few = asked[first : first + TOGETHER]
        for one, said in zip(few, reading.of([one.cache for one in few]), strict=True):
            known = {"sample": number, **identity(one), "slots": start.slots, "was_right": reading.right}
            seen = answered.get(one.key, {"canary": np.nan, "canary_right": np.nan})
            yield known | said | seen | inspected(model, clean, start, one)


def asked_of(model: Model, config: Config, tokens: Tokens, start: KVCache, number: int) -> list[AskedCache]:
    """The caches of a prompt that are asked about."""
    ways = other_ways(model, tokens, start, number)
    asked = [*sound_caches(start, ways, number)]
    if number < config.samples:
        asked += wrong_caches(model, tokens, ways, number, config.seed, config.bugs, config.sizes)
    return asked


def recipe(texts: int) -> CleanRecipe:
    """What an audit learns from so many texts: fewer set its limits than by default, since `conclude` sets one, too."""
    third = texts // 3
    return replace(
        CleanRecipe(), fitted=texts - 2 * third, tailed=third, calibrated=third, rate=max(0.01, 1 / (third + 1))
    )


def answers(canary: QuestionedCaches, asked: AskedCache) -> dict[str, float]:
    """How far a canary's answers move, and whether the one that moves most was asked for a struck block."""
    try:
        gaps = canary.gaps(as_read(asked.cache, canary.start))
    except UserError:  # K, V or the logits are not finite
        return {"canary": LARGEST, "canary_right": np.nan}
    right = float(int(np.argmax(gaps)) in asked.blocks) if asked.planted else np.nan
    return {"canary": min(LARGEST, max(gaps)), "canary_right": right}


def identity(asked: AskedCache) -> dict[str, Any]:
    """What a row is of."""
    planted = asked.planted
    return {
        "bug": asked.name,
        "size": asked.size,
        "base": asked.base,
        "kind": planted.report.kind if planted else "",
        "layer": planted.layers[0] if planted else -1,
        "layers": len(planted.layers) if planted else 0,
        "block": asked.blocks.start if planted else -1,
        "blocks": len(asked.blocks),
    }


class ReferenceReading:
    """What a model says from caches of one prompt, held against what it says from the reference.

    Attributes:
        right: whether its answer from the reference is right.
    """

    def __init__(self, model: Model, task: Task, item: Item, start: KVCache, last: Tokens, tokens: int) -> None:
        """Reads the reference."""
        self.model, self.task, self.item, self.last, self.count = model, task, item, last, tokens
        self.start = start
        self.tokens, texts = self.said(start)
        self.given = last + Tokens.of(self.tokens[0][:-1], GENERATED, last.following)
        self.logits = self.logits_of(start)
        self.right = self.is_right(texts[0])

    def of(self, caches: Sequence[KVCache]) -> list[dict[str, float]]:
        """The scores that rest on the output, cache by cache."""
        calm = [row for row, cache in enumerate(caches) if all(bool(t.abs().max() < LARGE) for t in cache.tensors)]
        scores = dict(zip(calm, self.scores([caches[row] for row in calm]), strict=True))
        for row in set(range(len(caches))).difference(calm):
            try:
                scores[row] = self.scores([caches[row]])[0]
            except UserError:  # K, V or the logits are not finite
                scores[row] = {"right": 0.0, "text": LOUD, "surprise": LOUD, "logprob": LOUD, "kl": np.nan}
        return [scores[row] for row in range(len(caches))]

    def scores(self, caches: Sequence[KVCache]) -> list[dict[str, float]]:
        """Of caches whose logits are finite."""
        if not caches:
            return []
        joined = KVCache.join([as_read(cache, self.start) for cache in caches])
        tokens, texts = self.said(joined)
        logits = self.logits_of(joined)
        kl = divergence(self.logits[:, 0].expand_as(logits[:, 0]), logits[:, 0])[0]
        places = torch.tensor(self.tokens[0], device=logits.device)[None, :, None]
        one, other = (
            both.log_softmax(-1).gather(2, places.expand(len(both), -1, -1))[..., 0] for both in (self.logits, logits)
        )
        change = one - other
        scores: list[dict[str, float]] = []
        for row, said in enumerate(tokens):
            differs = first_divergence(self.tokens[0], said)
            scores.append(
                {
                    "right": float(self.is_right(texts[row])),
                    "text": 0.0 if differs is None else 1 - differs / self.count,
                    "surprise": abs(float(change[row].mean())),
                    "logprob": float(change[row].abs().max()),
                    "kl": float(kl[row]),
                }
            )
        return scores

    def said(self, cache: KVCache) -> tuple[list[tuple[int, ...]], list[str]]:
        """The greedy continuation of each row, whatever it contains, and its text."""
        asked = [self.last] * cache.batch
        reply = generate(self.model.lanes, asked, cache, max_new_tokens=self.count, stop=())
        return list(reply.tokens), list(reply.texts)

    def logits_of(self, cache: KVCache) -> Float[Tensor, "rows tokens vocab"]:
        """Of the reference's continuation."""
        return self.model.extend(cache, [self.given] * cache.batch, logits=len(self.tokens[0]))[1].float()

    def is_right(self, text: str) -> bool:
        return bool(self.task.score(text, self.item)[self.task.scorers[0]])


def as_read(cache: KVCache, reference: KVCache) -> KVCache:
    """The cache in the reference's dtype, in which the model reads it."""
    layers = (
        {part: held.to(own[part].dtype) for part, held in layer.items()}
        for layer, own in zip(cache.layers, reference.layers, strict=True)
    )
    return replace(cache, layers=tuple(layers))
