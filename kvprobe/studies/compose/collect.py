"""Two documents are read by themselves, joined, partly read again, and asked about, beside one prefill of both."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.editing import concatenate, recompute
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.studies.compose import Config
from kvprobe.studies.compose.documents import TwoDocuments, pairs
from kvprobe.text.first_tokens import first_tokens
from kvprobe.text.tokens import Tokens

FIRST, DEVIATING, RANDOM = "first", "deviating", "random"
WAYS = (FIRST, DEVIATING, RANDOM)
"""Which slots of the second document are read again: its first ones; those of which K and V of the second layer are
furthest from what one prefill writes there, as in CacheBlend; or random ones."""
JOINT, ALONE = "joint", "alone"
"""One prefill of both documents; and the second document by itself, where the first cannot be known."""


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """A row for each `sample`, `kind` of question, `way` and `share` read again (percent; nothing is where it is 0).

    Whether the right option is the likeliest (`right`) and another one than after one prefill (`flipped`), the `margin`
    of the right option over the best other one, and `kl` from one prefill, of the next token, in nats.
    """
    parts = Parts(model, config, run)
    return parts.table(measure, range(config.samples), "compose", doing="Joining documents", unit="sample")


def measure(model: Model, config: Config, sample: int) -> Iterator[dict[str, Any]]:
    """The rows of a sample."""
    for number, documents in enumerate(pairs(sample, config.facts, config.seed)):
        yield from ({**row, "sample": sample} for row in joined_rows(model, config, documents, (sample, number)))


def joined_rows(
    model: Model, config: Config, documents: TwoDocuments, draw: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    """The rows of two documents.

    Args:
        draw: sample and number of the documents, by which slots are drawn.
    """
    first = Tokens.of(model.tokens(documents.first)[0].ids, "first")
    second = Tokens.of(text_tokens(model, documents.second), "second")
    joint = model.prefill(first + second.shifted(len(first)))
    joined = concatenate([model.prefill(first), model.prefill(second)])
    caches: dict[tuple[str, int], KVCache] = {(JOINT, 100): joint, (ALONE, 0): model.prefill(second)}
    whole = recompute(model, joined, "second")
    rng = np.random.default_rng((config.seed, *draw))
    orders = {
        FIRST: list(range(len(second))),
        DEVIATING: deviating(model.as_seen(joined), joint, len(first)),
        RANDOM: rng.permutation(len(second)).tolist(),
    }
    for way, order in orders.items():
        caches[way, 0], caches[way, 100] = joined, whole
        for share in config.shares:
            count = max(1, round(len(second) * share / 100))
            caches[way, share] = recompute(model, joined, slots=sorted(len(first) + place for place in order[:count]))
    asked = [text_tokens(model, one.text) for one in documents.asked]
    known: dict[int, torch.Tensor] = {}
    for (way, share), cache in caches.items():
        logs = known.get(id(cache))
        if logs is None:
            following = int(cache.ledger.following[0])
            runs = [Tokens.of(ids, "asked", following) for ids in asked]
            logs = known[id(cache)] = model.extend(cache, runs)[1][:, -1].double().log_softmax(-1).cpu()
        for one, own, true in zip(documents.asked, logs, known[id(joint)], strict=True):
            options = first_tokens(model.tokenizer, [f" {word}" for word in one.options])
            right, *others = own[options].tolist()
            yield {
                "kind": one.kind,
                "way": way,
                "share": share,
                "right": float(right > max(others)),
                "flipped": float(int(own[options].argmax()) != int(true[options].argmax())),
                "margin": right - max(others),
                "kl": float(relative_entropy(true, own).clamp(min=0)),
            }


def deviating(joined: KVCache, joint: KVCache, start: int) -> list[int]:
    """The slots from `start` on, counted from there, those first that are furthest off in the second layer."""
    own, true = joined.layers[1], joint.layers[1]
    off = sum((own[name][0] - true[name][0]).float().square().sum((0, 2)) for name in own)
    assert isinstance(off, torch.Tensor)
    return off[start:].argsort(descending=True, stable=True).tolist()


def text_tokens(model: Model, text: str) -> Sequence[int]:
    """The tokens of a text that stands after others."""
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]
