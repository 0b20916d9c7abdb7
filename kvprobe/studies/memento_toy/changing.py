"""Is what mementos hold of a hidden block used? The block is exchanged for another, and nothing else that can be seen.

What the first memento after it states is compared under caches that differ in the hidden block alone. Its other digits
either fit the text as well (`digits`), or have another sum than the text states (`sum`): then the memento that the text
asks for is another than the one that the hidden block asks for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.model import Model
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.probes import BOTH
from kvprobe.studies.memento_toy.reading import hide, memento, retained, rows_of
from kvprobe.tasks.mementos import PLACES, Trace, block_name, draw_alike, draw_trace, memento_name
from kvprobe.text.tokens import Tokens

OWN, OTHER_DIGITS, OTHER_SUM, DONOR = "own", "digits", "sum", "donor"
PARTS: Mapping[str, Literal["K", "V", "KV"]] = {"K": "K", "V": "V", BOTH: "KV"}


Pair = tuple[Trace, Mapping[str, Trace]]
"""A trace, and the same with other digits in its block, by kind of change."""


def draw_pair(config: Config, rng: np.random.Generator) -> Pair:
    """A random trace whose block has other digits that fit the text; a block of zeros, or of nines, has none."""
    number = config.block
    while True:
        trace, other = (draw_trace(rng, config.content, config.blocks) for _ in range(2))
        alike = with_block(trace, number, draw_alike(trace, rng).blocks[number - 1])
        other = with_block(trace, number, other.blocks[number - 1])
        if alike != trace and (config.content == "copy" or other.mementos != trace.mementos):
            return trace, {OTHER_DIGITS: alike} | ({OTHER_SUM: other} if config.content == "sum" else {})


def with_block(trace: Trace, number: int, digits: tuple[int, ...]) -> Trace:
    return replace(trace, blocks=(*trace.blocks[: number - 1], digits, *trace.blocks[number:]))


def measure_changed(model: Model, pairs: Sequence[Pair], config: Config) -> pd.DataFrame:
    """A row per trace (its place in `pairs`), change of the hidden block (`condition`) and `part` of the cache that it
    is felt through.

    Columns: `right`, whether each digit of the memento that the text asks for is the likeliest; `turned`, whether any
    of its likeliest digits is another than with the hidden block as it was; `kl`, the divergence of what is predicted
    from what is predicted then, in nats over the three digits; and `margin`, by how many nats that memento is likelier
    than the one that the exchanged block asks for, where that is another.
    """
    own = rows_of(model, [trace for trace, _ in pairs])
    others = {kind: rows_of(model, [changed[kind] for _, changed in pairs]) for kind in pairs[0][1]}
    span = own[0].span(block_name(config.block))
    base = _before(model, own, config)
    # What was read in view of the block and is still in view: its memento, and later blocks that are kept, with theirs.
    carriers = [memento_name(config.block)]
    carriers += [
        name(number) for number in range(config.block + 1, config.hidden_from) for name in (block_name, memento_name)
    ]
    rival = memento(others[OTHER_SUM], config.hidden_from) if OTHER_SUM in others else None
    first = _read(model, base, own, config)
    before = _scores(model, first, memento(own, config.hidden_from))
    tables = [_row(model, first, before, own, rival, config).assign(condition=OWN, part=BOTH)]
    for kind, rows in others.items():
        mixed = [row[: span.start] + other[span] + row[span.stop :] for row, other in zip(own, rows, strict=True)]
        donor = _before(model, mixed, config)
        for part, letters in PARTS.items():
            patched = _read(model, base.patch(donor, *carriers, part=letters), own, config)
            asked = rival if kind == OTHER_SUM else None
            tables.append(_row(model, patched, before, own, asked, config).assign(condition=kind, part=part))
    if rival is not None:
        # Of a donor all is as the exchanged block has it, the text too.
        fits = _read(model, _before(model, others[OTHER_SUM], config), own, config)
        tables.append(_row(model, fits, before, own, rival, config).assign(condition=DONOR, part=BOTH))
    return pd.concat(tables, ignore_index=True)


def _before(model: Model, rows: Sequence[Tokens], config: Config) -> KVCache:
    """The cache as the first block sees it from which the block is hidden."""
    *_, last = retained(model, rows, config.keep, config.hidden_from - 1)
    return hide(last.cache, last.number, config.keep)


def _read(model: Model, cache: KVCache, own: Sequence[Tokens], config: Config) -> KVCache:
    """The cache once that block has been read."""
    span = own[0].span(block_name(config.hidden_from))
    return model.extend(cache, [row[span] for row in own])[0]


def _row(
    model: Model,
    cache: KVCache,
    before: Float[Tensor, "rows places words"],
    own: Sequence[Tokens],
    rival: Sequence[Tokens] | None,
    config: Config,
) -> pd.DataFrame:
    text = memento(own, config.hidden_from)
    scores = _scores(model, cache, text)
    likeliest = scores.argmax(-1)
    numbers = {
        "right": (likeliest == _stated(text)).all(1),
        "turned": (likeliest != before.argmax(-1)).any(1),
        "kl": (before.exp() * (before - scores)).sum((1, 2)),
        "margin": torch.full((len(own),), torch.nan),
    }
    if rival is not None:
        numbers["margin"] = _likelihood(scores, text) - _likelihood(_scores(model, cache, rival), rival)
    table = {name: tensor.double().cpu().numpy() for name, tensor in numbers.items()}
    return pd.DataFrame({"trace": range(len(own)), **table})


def _scores(model: Model, cache: KVCache, text: Sequence[Tokens]) -> Float[Tensor, "rows places words"]:
    """The log-probabilities of the digits of a memento, each after the true ones before it."""
    _, logits = model.extend(cache, list(text), logits=PLACES + 1)
    return logits[:, :PLACES].double().log_softmax(-1).cpu()


def _stated(text: Sequence[Tokens]) -> Int[Tensor, "rows places"]:
    return torch.tensor([row.ids[-PLACES:] for row in text])


def _likelihood(scores: Float[Tensor, "rows places words"], text: Sequence[Tokens]) -> Float[Tensor, "rows"]:
    return scores.gather(2, _stated(text)[:, :, None]).sum((1, 2))
