"""Traces of `kvprobe.tasks.mementos` on their way through caches: blocks are read, summed up by mementos, and hidden.

Mementos are `retained`, computed in view of their block, `restarted`, computed again without hidden blocks, or
`stood_in`, computed in view of other blocks. All traces of a batch have the same layout, so that a trace is tokenised
by looking up its words.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.tasks.mementos import PLACES, Trace, block_name, memento_name
from kvprobe.text.tokens import Tokens

Edit = Callable[[int, KVCache], KVCache]
"""What is done to the cache once a memento of this number has been written."""
Vectors = Float[Tensor, "layers 2 rows slots width"]
"""K and V, KV heads side by side."""


@dataclass(frozen=True)
class Written:
    """What there is once a memento has been written.

    Attributes:
        number: of the memento.
        cache: with what was in view of the memento, and itself.
        likeliest: whether each of its digits was the likeliest.
    """

    number: int
    cache: KVCache
    likeliest: Bool[Tensor, "rows places"]

    @property
    def vectors(self) -> Vectors:
        """See `vectors_of`."""
        return vectors_of(self.number, self.cache)


def vectors_of(number: int, cache: KVCache) -> Vectors:
    """K and V in the slots of a memento."""
    where = cache.ledger.in_segments([memento_name(number)])[0]
    pairs = zip(cache.keys, cache.values, strict=True)
    return torch.stack([torch.stack([heads[:, :, where].transpose(1, 2).flatten(2) for heads in of]) for of in pairs])


def unchanged(_: int, cache: KVCache) -> KVCache:
    """No edit."""
    return cache


def token_rows(model: Model, traces: Sequence[Trace]) -> list[Tokens]:
    """The tokens of traces of one layout, a row each.

    Raises:
        UserError: the tokenizer does not make one token of each word.
    """
    (first,) = model.tokens(traces[0].conversation())
    words = {word for trace in traces for word in trace.words()}
    numbers = dict(zip(words, model.tokenizer.convert_tokens_to_ids([*words]), strict=True))
    if tuple(numbers[word] for word in traces[0].words()) != first.ids:
        raise UserError(
            f"{model.name} does not read a trace as one token for each digit; give a model of `kvprobe train memento`."
        )
    return [replace(first, ids=tuple(numbers[word] for word in trace.words())) for trace in traces]


def piece(rows: Sequence[Tokens], first: int, last: int) -> list[Tokens]:
    """From block `first` to memento `last`, or memento 0 with the start of the trace where `first` is 0."""
    start = rows[0].span(block_name(first)).start if first else 0
    stop = rows[0].span(memento_name(last)).stop
    return [row[start:stop] for row in rows]


def memento(rows: Sequence[Tokens], number: int) -> list[Tokens]:
    """The tokens of a memento."""
    span = rows[0].span(memento_name(number))
    return [row[span] for row in rows]


def retained(model: Model, rows: Sequence[Tokens], keep: int, last: int, edit: Edit = unchanged) -> Iterator[Written]:
    """Mementos 1 to `last`; each block is hidden as soon as it has a memento and `keep` later blocks have one, too.

    Args:
        edit: what is done to each memento before the next block is read.
    """
    cache = model.prefill(piece(rows, 0, 0))
    for number in range(1, last + 1):
        cache, likeliest = _read(model, cache, piece(rows, number, number))
        cache = edit(number, cache)
        yield Written(number, cache, likeliest)
        cache = hide(cache, number, keep)


def hide(cache: KVCache, number: int, keep: int) -> KVCache:
    """The cache after memento `number`, as the next block sees it. A block that is hidden stays so, so it need not be
    stored."""
    return cache.evict(block_name(number - keep)) if number > keep else cache


def restarted(model: Model, rows: Sequence[Tokens], keep: int, numbers: Sequence[int]) -> Iterator[Written]:
    """These mementos, in order; what is in view of each has been computed as if no hidden block had been there."""
    alone, done = model.prefill(piece(rows, 0, 0)), 0
    for number in numbers:
        while done < number - 1 - keep:
            done += 1
            alone, _ = model.extend(alone, memento(rows, done))
        yield Written(number, *_read(model, alone, piece(rows, done + 1, number)))


def stood_in(model: Model, rows: Sequence[Tokens], others: Sequence[Tokens], keep: int, last: int) -> Iterator[Written]:
    """Mementos 1 to `last` as `retained` gives them of the traces whose hidden blocks are those of other traces.

    Args:
        others: the same traces with other digits that fit the mementos.
    """
    base, run = model.prefill(piece(rows, 0, 0)), retained(model, others, keep, last)
    for number in range(1, last + 1):
        own = range(max(1, number - keep), number + 1)
        if own[0] > 1:
            written = next(run)
            base = hide(written.cache, written.number, keep)
        cache, likeliest = _read(model, base, piece(rows, own[0], own[0]))
        for block in own[1:]:
            cache, likeliest = _read(model, hide(cache, block - 1, keep), piece(rows, block, block))
        yield Written(number, cache, likeliest)


def _read(model: Model, cache: KVCache, text: list[Tokens]) -> tuple[KVCache, Bool[Tensor, "rows places"]]:
    """The cache after blocks and their mementos, and whether each digit of the last memento was the likeliest."""
    cache, logits = model.extend(cache, text, logits=PLACES + 1)
    stated = torch.tensor([row.ids[-PLACES:] for row in text], device=logits.device)
    return cache, logits[:, :PLACES].argmax(-1) == stated
