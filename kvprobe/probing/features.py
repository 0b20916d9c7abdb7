"""What probes read: one vector per conversation and site. A site is a layer, a KV head or all side by side, and a read-out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probing.splits import Split, centred_within, paired_features
from kvprobe.tasks.designs import Design, Target
from kvprobe.text.transcript import Tokens, Transcript

READS = ("mean", "last")
"""How a segment's slots become one vector: their mean, or the last one."""

_CHUNK_BYTES = 60_000_000
_ROWS = 16  # conversations that are read side by side


class Site(NamedTuple):
    """Where a probe reads.

    Attributes:
        layer: whose K, V or residual stream.
        head: KV head, or None where heads are side by side or there are none.
        read: how a segment's slots become one vector: `mean`, `last`, or `slot` for a design of single slots.
    """

    layer: int
    head: int | None
    read: str


@dataclass(frozen=True)
class Features:
    """What probes read of every sample, and what they are to recover.

    Attributes:
        tensors: by family.
        sites: by family, in the order of its tensor.
        rows: which row each sample reads; several may read the same.
        labels: class numbers.
        contexts: number of each sample's context.
        texts: the tokens that each sample's vectors were read from.
    """

    tensors: Mapping[Family, Float[Tensor, "rows sites dim"]]
    sites: Mapping[Family, tuple[Site, ...]]
    rows: Int[np.ndarray, "samples"]
    labels: Int[Tensor, "targets samples"]
    contexts: Int[np.ndarray, "samples"]
    target: Target
    texts: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of_read_outs(
        cls,
        tensors: Mapping[Family, Float[Tensor, "rows layers reads dim"]],
        rows: Int[np.ndarray, "samples"],
        labels: Int[Tensor, "targets samples"],
        contexts: Int[np.ndarray, "samples"],
        target: Target,
        texts: tuple[tuple[int, ...], ...] | None = None,
    ) -> "Features":
        """Features from what `read_outs` returned, heads side by side."""
        sites: dict[Family, tuple[Site, ...]] = {
            family: tuple(Site(layer, None, read) for layer in range(tensor.shape[1]) for read in READS)
            for family, tensor in tensors.items()
        }
        flat: dict[Family, Tensor] = {family: tensor.flatten(1, 2) for family, tensor in tensors.items()}
        return cls(flat, sites, rows, labels, contexts, target, texts)

    def batches(
        self, family: Family, split: Split
    ) -> Iterator[tuple[slice, Float[Tensor, "probes samples dim"], Float[Tensor, "probes"]]]:
        """A few sites at a time, to limit memory: their indices, what they read (centred within context for the paired
        split), and its root mean square before that."""
        tensor = self.tensors[family]
        rows = torch.from_numpy(self.rows).to(tensor.device)
        chunk = max(1, _CHUNK_BYTES // (8 * len(rows) * tensor.shape[2]))
        for first in range(0, tensor.shape[1], chunk):
            seen = tensor[:, first : first + chunk][rows]
            size = seen.square().mean((0, 2)).sqrt()
            if split == "paired":
                seen = centred_within(seen, self.contexts)
            yield slice(first, first + chunk), seen.transpose(0, 1).contiguous(), size

    def at(self, family: Family, site: Site, split: Split = "random") -> Float[Tensor, "1 samples dim"]:
        """What the probe at one site reads: centred within context for the paired split, with round-off set to zero."""
        seen = self.tensors[family][:, self.sites[family].index(site)][torch.from_numpy(self.rows)][None]
        return paired_features(seen, self.contexts) if split == "paired" else seen


def read_outs(stacked: Tensor) -> Float[Tensor, "rows layers reads dim"]:
    """Captured layers of a family as one vector per row and layer, KV heads side by side: the mean over the slots,
    and the last slot.

    Args:
        stacked: `[layers, rows, kv_heads, slots, d_head]` or `[layers, rows, slots, d_model]`.
    """
    vectors = stacked.float()
    if vectors.dim() == 5:
        vectors = vectors.permute(0, 1, 3, 2, 4).flatten(3)
    return torch.stack([vectors.mean(2), vectors[:, :, -1]], 2).transpose(0, 1)


def read_features(
    model: Model,
    design: Design,
    at: str,
    *,
    hide: Sequence[str] = (),
    families: Sequence[Family] = ("k", "v", "resid_post"),
    per_head: bool = False,
    treat: Callable[[KVCache, int], KVCache] | None = None,
    note: str = "Reading conversations",
) -> Features:
    """What stands at segment `at` of each sample's conversation, up to the part `answer` if the segment has one.

    Conversations that do not differ up to there are read once, and so is what those of one context begin with.

    Args:
        hide: segments that are masked when `at` begins.
        per_head: a site for each KV head instead of all heads side by side.
        treat: what is done to the cache when `at` begins, after masking; it is given the sample's number, the first of
            those that share the conversation.

    Raises:
        UserError: an unknown segment, one that cannot be hidden from `at`, or a slot outside of what is read.
    """
    groups: dict[str, dict[Tokens, list[int]]] = {}
    for number, sample in enumerate(design.samples):
        tokens = _up_to(model, sample.transcript, at, hide)
        groups.setdefault(sample.context, {}).setdefault(tokens, []).append(number)

    vectors: dict[Family, list[Float[Tensor, "1 sites dim"]]] = {family: [] for family in families}
    sites: dict[Family, tuple[Site, ...]] = {}
    rows = np.empty(len(design.samples), dtype=np.int64)
    texts: list[tuple[int, ...]] = [()] * len(design.samples)
    read = 0
    reading = (each for own in groups.values() for each in _stacked(model, own, at, hide, families, treat))
    for tokens, members, stacked in tqdm(reading, desc=note, unit="conversation", total=sum(map(len, groups.values()))):
        span = tokens.span(at)
        slots = [_within(span, design.samples[number].slot, number, at) for number in members]
        places = {slot: read + place for place, slot in enumerate(dict.fromkeys(slots))}
        read += len(places)
        for family in families:
            for slot in places:
                each, sites[family] = _vectors(stacked[family], slot, per_head)
                vectors[family].append(each.cpu())
        for number, slot in zip(members, slots, strict=True):
            rows[number] = places[slot]
            ids = tokens.ids[span]
            texts[number] = ids if slot is None else (ids[slot],)
    _, contexts = np.unique([sample.context for sample in design.samples], return_inverse=True)
    labels = torch.tensor([sample.labels for sample in design.samples]).T.contiguous()
    tensors: dict[Family, Tensor] = {family: torch.cat(each) for family, each in vectors.items()}
    return Features(tensors, sites, rows, labels, contexts, design.target, tuple(texts))


def _within(span: slice, slot: int | None, number: int, at: str) -> int | None:
    """A sample's slot counted from the beginning of what is read."""
    if slot is not None and not span.start <= slot < span.stop:
        raise UserError(
            f"Sample {number} reads slot {slot}; what is read of segment {at!r} are the slots {span.start} to {span.stop - 1}."
        )
    return None if slot is None else slot - span.start


def _stacked(
    model: Model,
    conversations: Mapping[Tokens, Sequence[int]],
    at: str,
    hide: Sequence[str],
    families: Sequence[Family],
    treat: Callable[[KVCache, int], KVCache] | None,
) -> Iterator[tuple[Tokens, Sequence[int], dict[Family, Tensor]]]:
    """Each conversation of a context, the samples that share it, and what stands at segment `at`, layer axis first.

    What the conversations have in common is read once, and from there on they are rows of one batch.
    """
    every = list(conversations)
    starts = [tokens.span(at).start for tokens in every]
    if 0 in starts and any(starts):
        # Where nothing stands before the segment there is no cache to read on from.
        for first in (True, False):
            some = {each: conversations[each] for each in every if (each.span(at).start == 0) == first}
            yield from _stacked(model, some, at, hide, families, treat)
        return
    common = 0
    while common < min(starts) and len({(tokens.ids[common], tokens.positions[common]) for tokens in every}) == 1:
        common += 1
    # A row of a batch cannot be empty.
    common -= common in starts and len(set(starts)) > 1
    prefix = model.prefill(every[0][:common]) if common else None
    for first in range(0, len(every), 1 if treat is not None else _ROWS):
        chunk = every[first : first + (1 if treat is not None else _ROWS)]
        between = [tokens[common : tokens.span(at).start] for tokens in chunk]
        past = model.extend(prefix, between)[0] if len(between[0]) else prefix
        past = past.mask(*hide) if past is not None and hide else past
        if treat is not None and past is not None:
            past = treat(past, conversations[chunk[0]][0])
        asked = [tokens[tokens.span(at)] for tokens in chunk]
        captured = model.capture(asked, families, past=past)
        stacks: dict[Family, Tensor] = {family: captured.stack(family) for family in families}
        for row, (tokens, own) in enumerate(zip(chunk, asked, strict=True)):
            one: dict[Family, Tensor] = {
                family: each[:, row : row + 1, ..., : len(own), :] for family, each in stacks.items()
            }
            yield tokens, conversations[tokens], one


def _up_to(model: Model, transcript: Transcript, at: str, hide: Sequence[str]) -> Tokens:
    """The tokens to the end of what is read."""
    tokens = transcript.tokens(model.tokenizer)
    span = tokens.span(at)
    for name in hide:
        if tokens.span(name).start >= span.start:
            raise UserError(f"Segment {name!r} cannot be hidden from {at!r}, which does not come after it.")
    answers = [index for index in range(span.start, span.stop) if tokens.parts[index] == "answer"]
    stop = answers[0] if answers else span.stop
    if stop == span.start:
        raise UserError(f"Nothing of segment {at!r} stands before its part 'answer', so there is nothing to read.")
    return tokens[:stop]


def _vectors(
    stacked: Tensor, slot: int | None, per_head: bool
) -> tuple[Float[Tensor, "1 sites dim"], tuple[Site, ...]]:
    """One conversation's vectors of a family, and where each was read.

    Args:
        stacked: `[layers, 1, kv_heads, slots, d_head]` or `[layers, 1, slots, d_model]`.
        slot: the one to read, instead of the read-outs over all.
    """
    if slot is not None:
        stacked = stacked[..., slot : slot + 1, :]
    reads = READS if slot is None else ("slot",)
    if per_head and stacked.dim() == 5:
        heads = stacked.shape[2]
        by_head = [read_outs(stacked[:, :, head])[0, :, : len(reads)] for head in range(heads)]
        sites = tuple(
            Site(layer, head, read) for layer in range(len(stacked)) for head in range(heads) for read in reads
        )
        return torch.stack(by_head, 1).flatten(0, 2)[None], sites
    read = read_outs(stacked)[0, :, : len(reads)]
    sites = tuple(Site(layer, None, each) for layer in range(len(stacked)) for each in reads)
    return read.flatten(0, 1)[None], sites
