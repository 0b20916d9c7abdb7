"""Edits for which the model reads: other text in a segment's place, slots computed again, a correction at the end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import torch

from kvprobe.arguments import AtLeastZero, checked_arguments
from kvprobe.cache.cache import KVCache, Slots
from kvprobe.cache.entries import entries
from kvprobe.editing.splicing import follow, one_row, refuse_quantised
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.readable import only_run
from kvprobe.inference.rows import Readable
from kvprobe.text.tokens import ANSWER_HEADER, Tokens

ERRATUM = "erratum"
"""Segment of a correction."""


@checked_arguments
def replace_text(
    model: Model, cache: KVCache, segment: str, text: Readable, *, window: AtLeastZero | Literal["all"] = 0
) -> KVCache:
    """The cache with other text in a segment, read after what stands before it, and `window` slots after it read again.

    What the chat template wrote around the text stays. Slots after it move by the difference in length. Those that are
    not read again keep what they had read of the old text; with `all`, nothing of it is left.

    Args:
        cache: of one row; see `KVCache.rows` and `KVCache.join`.
        text: new text of the segment, or its token ids; to take a segment out, evict it.
        window: how many of the slots after it are computed again, as in arXiv 2609.17983.

    Raises:
        UserError: several rows or texts, no text, quantised slots, no such segment, or one whose text is interrupted; a
            recurrent layer that decays over slots evicted right after it.
    """
    refuse_quantised(cache)
    one_row(cache)
    cache = _without_padding(cache)
    ledger = cache.ledger
    chosen = ledger.in_segments([segment]) & ~ledger.delimiters
    places = chosen[0].nonzero()[:, 0].tolist()
    if not places or places[-1] - places[0] + 1 != len(places):
        raise UserError(f"The text of segment {segment!r} is empty or interrupted; replace one that stands together.")
    start, stop = places[0], places[-1] + 1
    _refuse_gaps(cache, [stop - 1])
    head = cache.rewind(slots=start)
    # Where gaps were closed, slots that are hidden take no positions.
    after = torch.cat([ledger.positions[0, stop:][ledger.live_somewhere[0, stop:]], ledger.following])[0]
    first, end = int(head.ledger.following[0]), min(int(ledger.positions[0, stop - 1]) + 1, int(after))
    ids = only_run(model.tokens_after(cache, text)).ids
    edited = model.extend(head if start else None, Tokens.of(ids, segment, first))[0]
    edited = follow(edited, _from(cache, stop, first + len(ids) - end))
    begin = start + len(ids)
    reread = edited.slots if window == "all" else min(begin + window, edited.slots)
    return _reread(model, edited, range(begin, reread), missing=True)


@checked_arguments
def recompute(model: Model, cache: KVCache, *segments: str, slots: Slots | None = None) -> KVCache:
    """The cache with these slots computed again, in order, each from what stands before it now.

    After `concatenate`, the first slots of each document (CacheBlend, arXiv 2405.16444) or all of them. Slots that are
    hidden stay as they are. With all slots of a cache without hidden ones, it is what the model would have written.

    Raises:
        UserError: several rows, quantised slots, or a slot that is hidden in some layers or heads alone.
    """
    refuse_quantised(cache)
    one_row(cache)
    chosen = cache.chosen(segments, slots)[~cache.ledger.padding].nonzero()[:, 0].tolist()
    return _reread(model, _without_padding(cache), chosen, missing=False)


@checked_arguments
def erratum(model: Model, cache: KVCache, text: str) -> KVCache:
    """The cache followed by a user's turn that corrects what was said, as segment `erratum`.

    Nothing before it changes. `cache.rewind("erratum")` is the inverse; of several, it takes all back.

    Raises:
        UserError: the model has no chat template.
    """
    turns = [_without_header(run) for run in model.prompts(cache, text)]
    return model.extend(cache, turns)[0]


def _without_header(run: Tokens) -> Tokens:
    kept = run.at([place for place, name in enumerate(run.segments) if name != ANSWER_HEADER])
    return replace(kept, segments=tuple(ERRATUM for _ in kept.segments))


def _reread(model: Model, cache: KVCache, places: Sequence[int], *, missing: bool) -> KVCache:
    """The cache with these slots read again, run by run.

    Args:
        missing: whether text that had been before them is gone; it is in any case where slots before them are hidden
            in some layers or heads, or positions empty, or the slots moved towards the start since.
    """
    whole, some = cache.ledger.live[:, 0].all(1).all(0), cache.ledger.live_somewhere[0]
    if mixed := [place for place in places if some[place] and not whole[place]]:
        raise UserError(f"Slot {mixed[0]} is hidden in some layers or heads alone; choose slots that are live in all.")
    _refuse_gaps(cache, places)
    seen = [place for place in places if whole[place]]
    nearer = cache.ledger.origins[0] > cache.ledger.positions[0]
    for _, run in groupby(enumerate(seen), lambda pair: pair[1] - pair[0]):
        slots = [place for _, place in run]
        start, stop = slots[0], slots[-1] + 1
        ledger = cache.ledger
        left_out = missing or not bool(whole[:start].all()) or int(ledger.positions[0, start]) != start
        names = [ledger.names[number] for number in entries(ledger.segments[0, start:stop], int)]
        again = Tokens(
            tuple(entries(ledger.tokens[0, start:stop], int)),
            tuple(entries(ledger.positions[0, start:stop], int)),
            tuple(names),
            (None,) * len(slots),
            tuple(left_out or moved for moved in entries(nearer[start:stop], bool)),
            tuple(entries(ledger.delimiters[0, start:stop], bool)),
        )
        read = model.extend(cache.rewind(slots=start) if start else None, again)[0]
        cache = follow(read, _from(cache, stop, 0))
    return cache


def _without_padding(cache: KVCache) -> KVCache:
    """The cache whose slots are counted as `KVCache.rewind` counts them."""
    return cache.take(*cache.ledger.order(~cache.ledger.padding))


def _from(cache: KVCache, slot: int, shift: int) -> KVCache:
    """The slots from this one on, moved by so many positions."""
    rest = torch.zeros_like(cache.ledger.padding)
    rest[:, slot:] = True
    tail = cache.take(*cache.ledger.order(rest))
    ledger = replace(tail.ledger, positions=tail.ledger.positions + shift, following=tail.ledger.following + shift)
    return replace(tail, ledger=ledger)


def _refuse_gaps(cache: KVCache, places: Sequence[int]) -> None:
    """Refuse to read slots again after which a recurrent layer decays for what was evicted there."""
    for layer in cache.layers:
        if "decay" in layer and bool(layer["decay"].chunk(2, -1)[1][:, :, list(places)].any()):
            raise UserError(
                "A recurrent layer decays where slots were evicted, which reading again would lose; close the gaps "
                "first with reindex()."
            )
