"""Features read from the conversations of a design: what a model's layers show at one segment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.capture import Captured, layers_by_family
from kvprobe.inference.model import Model
from kvprobe.inference.shared import common_start
from kvprobe.models.lens import Family
from kvprobe.probing.features import READS, Features, Site, read_outs
from kvprobe.progress import Bar
from kvprobe.tasks.designs import Design, Sample
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

When = Literal["after", "before"]
"""Segments are hidden after a segment was read with them in view, or before it is read."""
ROWS = 16
"""Conversations that are read side by side."""


@dataclass(frozen=True)
class Reading:
    """Conversations of a context side by side, each read up to the end of what is read of a segment.

    Attributes:
        tokens: of each row.
        members: the numbers of the samples that share each row's conversation.
        asked: the tokens of the segment, row by row.
        before: the cache when the segment begins, with nothing hidden or treated; one row where all share it, None
            where nothing comes before.
        captured: what the segment shows, after hiding and treatment; with the cache after it and the logits after its
            last token, if they were asked for.
    """

    tokens: Sequence[Tokens]
    members: Sequence[Sequence[int]]
    asked: Sequence[Tokens]
    before: KVCache | None
    captured: Captured


def read_features(
    model: Model,
    design: Design,
    at: str,
    *,
    hide: Sequence[str] = (),
    families: Sequence[Family | str] = ("k", "v", "resid_post"),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    per_head: bool = False,
    treat: Callable[[KVCache, int], KVCache] | None = None,
    follow: Callable[[Reading], None] | None = None,
    note: str = "Reading conversations",
) -> Features:
    """What the model shows at segment `at` of each sample's conversation, up to the part `answer` if the segment has
    one.

    Conversations that are equal up to there are read once, and so is the common beginning of those of one context.

    Args:
        hide: segments that are masked when `at` begins.
        families: or TransformerLens' names of sites, such as `blocks.3.attn.hook_v`, each of which names its layer.
        layers: all by default.
        heads: KV heads, a site for each; by default all of them side by side.
        per_head: a site for each KV head, of all heads.
        treat: applied to the cache when `at` begins, after masking; its second argument is the number of the first
            sample that has the conversation.
        follow: called with each reading, to go on from where it ends.

    Raises:
        UserError: an unknown segment, family, layer or KV head, a segment that cannot be hidden from `at`, or a slot
            outside what is read.
    """
    wanted = layers_by_family(families, layers, model.geometry)
    if heads is not None or per_head:
        n_heads = model.geometry.n_kv_heads
        heads = range(n_heads) if heads is None else heads
        if not heads or not all(0 <= head < n_heads for head in heads):
            raise UserError(f"heads is {str(heads)[:40]!r}; give a list of KV heads, 0 to {n_heads - 1}.")
        heads = sorted(set(heads))
    groups = _by_context(model, design, at, hide)
    vectors: dict[Family, list[Float[Tensor, "1 sites dim"]]] = {family: [] for family in wanted}
    sites: dict[Family, tuple[Site, ...]] = {}
    rows = np.empty(len(design.samples), dtype=np.int64)
    texts: list[tuple[int, ...]] = [()] * len(design.samples)
    count = 0
    read = _read(model, groups, at, hide, wanted, treat, keep_cache=follow is not None)
    stacks = (one for reading in read for one in _stacked(reading, wanted, follow))
    for tokens, members, stacked in Bar(stacks, desc=note, unit="conversation", total=sum(map(len, groups.values()))):
        span = tokens.span(at)
        slots = [_within(span, design.samples[number].slot, number, at) for number in members]
        places = {slot: count + place for place, slot in enumerate(dict.fromkeys(slots))}
        count += len(places)
        for family, of_family in wanted.items():
            for slot in places:
                row, sites[family] = _vectors(stacked[family], slot, of_family, heads)
                vectors[family].append(row.cpu())
        for number, slot in zip(members, slots, strict=True):
            rows[number] = places[slot]
            ids = tokens.ids[span]
            texts[number] = ids if slot is None else (ids[slot],)
    labels, contexts = labels_of(design)
    tensors: dict[Family, Tensor] = {family: torch.cat(rows_of) for family, rows_of in vectors.items()}
    return Features(tensors, sites, rows, labels, contexts, design.target, tuple(texts))


def labels_of(design: Design) -> tuple[Int[Tensor, "targets samples"], Int[np.ndarray, "samples"]]:
    """The class numbers of each sample, and the number of its context."""
    _, contexts = np.unique([sample.context for sample in design.samples], return_inverse=True)
    return torch.tensor([sample.labels for sample in design.samples]).T.contiguous(), contexts


def _within(span: slice, slot: int | None, number: int, at: str) -> int | None:
    """A sample's slot, counted from the beginning of what is read."""
    if slot is not None and not span.start <= slot < span.stop:
        raise UserError(
            f"Sample {number} reads slot {slot}, which is not in segment {at!r}; choose one of its slots, {span.start} "
            f"to {span.stop - 1}."
        )
    return None if slot is None else slot - span.start


def readings(model: Model, design: Design, at: str, *, hide: Sequence[str] = ()) -> Iterator[Reading]:
    """The readings that `read_features` makes, with nothing captured but the cache and the logits."""
    return _read(model, _by_context(model, design, at, hide), at, hide, {}, None, keep_cache=True)


def restarted(model: Model, design: Design, hide: Sequence[str]) -> Design:
    """The design without these segments; the remaining tokens keep their positions, and a slot its token."""

    def without(sample: Sample) -> Sample:
        slot = sample.slot
        if slot is not None:
            slot -= sum(name in hide for name in sample.transcript.tokens(model.tokenizer).segments[:slot])
        return replace(sample, transcript=sample.transcript.without(*hide), slot=slot)

    return replace(design, samples=tuple(map(without, design.samples)))


def _by_context(model: Model, design: Design, at: str, hide: Sequence[str]) -> dict[str, dict[Tokens, list[int]]]:
    """For each context its conversations, up to the end of what is read, and the samples that share each."""
    groups: dict[str, dict[Tokens, list[int]]] = {}
    for number, sample in enumerate(design.samples):
        tokens = _up_to(model, sample.transcript, at, hide)
        groups.setdefault(sample.context, {}).setdefault(tokens, []).append(number)
    return groups


def _read(
    model: Model,
    groups: Mapping[str, Mapping[Tokens, Sequence[int]]],
    at: str,
    hide: Sequence[str],
    wanted: Mapping[Family, Sequence[int]],
    treat: Callable[[KVCache, int], KVCache] | None,
    keep_cache: bool,
) -> Iterator[Reading]:
    """The common beginning of the conversations of a context is read once; after it they are rows of one batch."""
    rows = 1 if treat is not None else ROWS
    for conversations in (part for group in groups.values() for part in _apart(group, at)):
        distinct = list(conversations)
        starts = [tokens.span(at).start for tokens in distinct]
        common = min(common_start(distinct), *starts)
        # A row of a batch cannot be empty.
        common -= common in starts and len(set(starts)) > 1
        prefix = model.prefill(distinct[0][:common]) if common else None
        for first in range(0, len(distinct), rows):
            chunk = distinct[first : first + rows]
            members = [conversations[tokens] for tokens in chunk]
            between = [tokens[common : tokens.span(at).start] for tokens in chunk]
            before = model.extend(prefix, between)[0] if len(between[0]) else prefix
            past = before.mask(*hide) if before is not None and hide else before
            if treat is not None and past is not None:
                past = treat(past, members[0][0])
            asked = [tokens[tokens.span(at)] for tokens in chunk]
            captured = model.capture(asked, wanted, past=past, keep_cache=keep_cache)
            yield Reading(chunk, members, asked, before, captured)


def _apart(group: Mapping[Tokens, Sequence[int]], at: str) -> Iterator[Mapping[Tokens, Sequence[int]]]:
    """Conversations with something before the segment, and those with nothing: they have no cache to continue from."""
    for empty in (True, False):
        part = {tokens: members for tokens, members in group.items() if (tokens.span(at).start == 0) == empty}
        if part:
            yield part


def _stacked(
    reading: Reading, wanted: Mapping[Family, Sequence[int]], follow: Callable[[Reading], None] | None
) -> Iterator[tuple[Tokens, Sequence[int], dict[Family, Tensor]]]:
    """Each conversation, the samples that share it, and what the model shows at the segment, layer axis first."""
    if follow is not None:
        follow(reading)
    stacks: dict[Family, Tensor] = {family: reading.captured.stack(family) for family in wanted}
    for row, (tokens, segment) in enumerate(zip(reading.tokens, reading.asked, strict=True)):
        shown: dict[Family, Tensor] = {
            family: stack[:, row : row + 1, ..., : len(segment), :] for family, stack in stacks.items()
        }
        yield tokens, reading.members[row], shown


def refuse_order(model: Model, transcript: Transcript, at: str, hide: Sequence[str]) -> Tokens:
    """The tokens of a conversation in which these segments can be hidden when `at` begins.

    Raises:
        UserError: an unknown segment, or one that does not come before `at`.
    """
    tokens = transcript.tokens(model.tokenizer)
    for name in hide:
        if tokens.span(name).start >= tokens.span(at).start:
            raise UserError(
                f"Segment {name!r} cannot be hidden from {at!r}, which does not come after it; hide earlier segments "
                "only."
            )
    return tokens


def _up_to(model: Model, transcript: Transcript, at: str, hide: Sequence[str]) -> Tokens:
    """The tokens to the end of what is read."""
    tokens = refuse_order(model, transcript, at, hide)
    span = tokens.span(at)
    answers = [index for index in range(span.start, span.stop) if tokens.parts[index] == "answer"]
    stop = answers[0] if answers else span.stop
    if stop == span.start:
        raise UserError(
            f"Segment {at!r} begins with its part 'answer', so there is nothing to read; put some text before the "
            "answer."
        )
    return tokens[:stop]


def _vectors(
    stacked: Tensor, slot: int | None, layers: Sequence[int], heads: Sequence[int] | None
) -> tuple[Float[Tensor, "1 sites dim"], tuple[Site, ...]]:
    """One conversation's vectors of a family, and where each was read.

    Args:
        stacked: `[layers, 1, kv_heads, slots, d_head]` or `[layers, 1, slots, d_model]`.
        slot: the only slot to read, instead of read-outs over all slots.
        heads: a site for each of these; None for all side by side.
    """
    if slot is not None:
        stacked = stacked[..., slot : slot + 1, :]
    reads = READS if slot is None else ("slot",)
    if heads is not None and stacked.dim() == 5:
        by_head = [read_outs(stacked[:, :, head])[0, :, : len(reads)] for head in heads]
        sites = tuple(Site(layer, head, read) for layer in layers for head in heads for read in reads)
        return torch.stack(by_head, 1).flatten(0, 2)[None], sites
    joined = read_outs(stacked)[0, :, : len(reads)]
    sites = tuple(Site(layer, None, read) for layer in layers for read in reads)
    return joined.flatten(0, 1)[None], sites
