"""Reader patching: a suffix is read after a cache, once for each cell, and only the suffix sees what was swapped.

All cells are rows of one pass over the suffix. Three things make it cheap, and none of them is an approximation:

- The base's K and V are shared by all rows: the attention of all their queries to it is one product, and nothing is
  copied.
- What a row swaps is handled apart: its scores replace those of the same slots, its values are added as differences.
- A row joins the pass only at the first layer at which it differs from the clean run (`kvprobe.patching.rows`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvprobe.cache.attention import scores_of
from kvprobe.cache.cache import KVCache, PatchedPart
from kvprobe.cache.parts import KV, LATENT
from kvprobe.cache.visibility import visible_by_layer
from kvprobe.inference.forward import new_slots, warn_of_taken_positions
from kvprobe.inference.model import Model
from kvprobe.inference.readable import only_run, refuse_unreadable
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.patching.grid import LATENT_PARTS, Cell, seen_in, stored_parts
from kvprobe.patching.heads import Heads, heads_of
from kvprobe.patching.memories import Memories
from kvprobe.patching.rows import BYTES, ROWS, Rows, cells_by_layer, forward, joining, of_all_rows, ordinary_logits
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True)
class Swaps:
    """What some rows see at one layer in place of the base's K or V: one entry for each row and slot.

    Attributes:
        rows: of the pass.
        slots: of the base.
        content: K or V of these slots.
        readers: which heads and tokens of each row see it; None where all do.
    """

    rows: Int[Tensor, "entries"]
    slots: Int[Tensor, "entries"]
    content: Float[Tensor, "entries kv_heads d"]
    readers: Bool[Tensor, "entries kv_heads groups queries"] | None


def suffixes(model: Model, base: KVCache, donor: KVCache, suffix: Tokens | str) -> tuple[Tokens, Tokens]:
    """What is read after a base of one row, and the same tokens as far from the end of the donor.

    Raises:
        UserError: there is nothing to read, or a token or position that the model does not have; or a cache holds NaN.
    """
    after_base = suffix_after(model, base, suffix)
    start = after_base.positions[0] + int(donor.ledger.following[0] - base.ledger.following[0])
    after_donor = after_base.shifted(start)
    for cache, after in ((base, after_base), (donor, after_donor)):
        refuse_unreadable(model.lanes, cache, [after], "plain")
        cache.refuse_nonfinite()
    warn_of_taken_positions(base, new_slots([after_base], model.lanes.device))
    return after_base, after_donor


def suffix_after(model: Model, base: KVCache, suffix: Tokens | str) -> Tokens:
    """The tokens of what is read after a base of one row."""
    return only_run(model.tokens_after(base, suffix, "suffix"), "suffix")


class Reader:
    """A suffix to be read after a base, with cells of it swapped.

    Args:
        base: one row, with keys at the positions at which they are seen.
        contents: what cells may hold instead, by `Cell.content`; each on the base's slots.
    """

    def __init__(self, lanes: Lanes, base: KVCache, contents: Mapping[str, KVCache], suffix: Tokens) -> None:
        self.lanes, self.base, self.contents = lanes, base, contents
        self.suffix, self.new = suffix, new_slots([suffix], lanes.device)
        self._ordinary: dict[int, Tensor] = {}
        self.swapped: dict[tuple[str, str], Heads] = {}
        self.heads, self.ledger = heads_of(lanes, base, suffix), base.ledger.append(self.new)
        self.memories = Memories(lanes, base, contents, self.ledger)
        lanes.refuse_far_positions(self.new.positions)
        self.reads = lanes.geometry.reads
        self.queries = len(suffix)
        self.seen = visible_by_layer(self.ledger, self.queries, lanes.geometry.reaches)

    def row_bytes(self, cells: Sequence[Cell]) -> int:
        """What a row takes at its widest: scores, their exponentials and masks, and its share of what is swapped."""
        shape = self.lanes.geometry
        swapped = max((len(cell.slots) for cell in cells), default=0)
        scores = shape.n_heads * self.queries * (self.base.slots + self.queries)
        d_head = max((keys.shape[2] for keys in self.heads["K"].values()), default=0)
        vectors = shape.n_heads * self.queries * d_head
        hidden = self.queries * (12 * shape.d_model + 8 * shape.n_heads * d_head)
        return 4 * (3 * scores + (2 * swapped + 6) * vectors + hidden) + self.memories.row_bytes

    def ordinary(self, kept: int) -> Float[Tensor, "kept vocab"]:
        """See `ordinary_logits`, of this suffix."""
        if kept not in self._ordinary:
            self._ordinary[kept] = ordinary_logits(self.lanes, self.base, self.suffix, kept)
        return self._ordinary[kept]

    def logits(self, cells: Sequence[Cell], kept: int) -> Float[Tensor, "rows kept vocab"]:
        """Logits after the last `kept` tokens of the suffix: of the clean row, then of each cell."""
        rows = Rows([cell.layers[0] for cell in cells])
        by_layer = cells_by_layer(rows, cells)
        for cell in cells:
            if seen_in(cell.part):
                self.content(cell)  # now, since the model cannot compute it within the pass

        def attend(attending: Attending) -> Float[Tensor, "rows heads queries d_value"]:
            source = self.reads[attending.layer]
            patched = by_layer[source]
            return self.attention(attending, self.swaps(source, patched, "K"), self.swaps(source, patched, "V"))

        ordinary = self.ordinary(kept)
        with (
            torch.no_grad(),
            self.lanes.attention_replaced_by(attend),
            joining(self.lanes.blocks, rows.joining),
            self.memories.given(rows, by_layer) as memories,
        ):
            return rows.in_order(forward(self.lanes, self.new.tokens, self.new.positions, ordinary, memories))

    def attention(
        self, attending: Attending, keys: "Swaps | None" = None, values: "Swaps | None" = None
    ) -> Float[Tensor, "rows heads queries d_value"]:
        """Attention of a layer to the base with these swaps, and to the suffix; see `attention`."""
        source = self.reads[attending.layer]
        base_keys, base_values = (self.heads[part][source] for part in KV)
        return attention(of_all_rows(attending), base_keys, base_values, self.seen[source], keys, values)

    def passes(self, cells: Sequence[Cell], kept: int) -> Iterator[Float[Tensor, "rows kept vocab"]]:
        """What `logits` gives of all cells, as many at once as memory allows: the clean row, then the cells in order.

        Args:
            cells: by their first layer, which is fastest.
        """
        yield (clean := self.logits([], kept))
        rows = max(1, min(ROWS, BYTES // (self.row_bytes(cells) + clean.numel() * clean.element_size())))
        for first in range(0, len(cells), rows):
            yield self.logits(cells[first : first + rows], kept)[1:]

    def swaps(self, layer: int, cells: Sequence[tuple[int, Cell]], part: str) -> Swaps | None:
        """What these rows (by number, with their cells) see at a layer in place of the base's K or V."""
        entries = [(row, cell) for row, cell in cells if layer in cell.layers and part in seen_in(cell.part)]
        if not entries:
            return None
        device = self.lanes.device
        lengths = torch.tensor([len(cell.slots) for _, cell in entries])
        rows = torch.tensor([row for row, _ in entries]).repeat_interleave(lengths).to(device)
        slots = torch.tensor([slot for _, cell in entries for slot in cell.slots], device=device)
        contents = [self.content(cell) for _, cell in entries]
        names = list(dict.fromkeys(contents))
        tensors = torch.stack([self.swapped[name][part][layer] for name in names])
        which = torch.tensor([*map(names.index, contents)]).repeat_interleave(lengths).to(device)
        readers = None
        if any({cell.kv_heads, cell.query_heads, cell.queries} != {None} for _, cell in entries):
            masks = torch.stack([self._readers(cell, len(tensors[0])) for _, cell in entries])
            readers = masks.repeat_interleave(lengths, 0).to(device)
        return Swaps(rows, slots, tensors[which, :, slots].float(), readers)

    def content(self, cell: Cell) -> tuple[str, str]:
        """Under which name `swapped` has what a cell holds."""
        latent: list[PatchedPart] = [part for part in LATENT if part in stored_parts(cell.part)]
        name = (cell.content, latent[0] if len(latent) == 1 else "")
        if name not in self.swapped:
            other = self.contents[cell.content]
            if len(latent) == 1:
                other = self.base.patch(other, slots=~self.base.ledger.padding, part=latent[0])
            self.swapped[name] = heads_of(self.lanes, other, self.suffix)
        return name

    def _readers(self, cell: Cell, count: int) -> Bool[Tensor, "kv_heads groups queries"]:
        """Which heads and tokens of the suffix see what a cell swaps, in a layer of so many KV heads."""
        heads = _mask(self.lanes.geometry.n_heads, cell.query_heads)
        queries = _mask(self.queries, cell.queries)
        # All heads read the one latent.
        kv_heads = _mask(count, None if cell.part in LATENT_PARTS else cell.kv_heads)
        return (heads[:, None] & queries).view(count, -1, self.queries) & kv_heads[:, None, None]


def attention(
    attending: Attending,
    keys: Float[Tensor, "kv_heads slots d_head"],
    values: Float[Tensor, "kv_heads slots d_value"],
    seen: Bool[Tensor, "1 kv_heads_or_1 queries all_slots"],
    swapped_keys: Swaps | None = None,
    swapped_values: Swaps | None = None,
) -> Float[Tensor, "rows heads queries d_value"]:
    """Attention of all rows to a prefix that they share and each to its own tokens, in fp32.

    The two parts are softmaxed under one maximum and one sum, so the result is that of attention to both together.
    """
    rows, heads, queries, _ = attending.query.shape
    kv_heads, slots = keys.shape[0], keys.shape[1]
    query = attending.query.float().view(rows, kv_heads, heads // kv_heads, queries, -1).transpose(0, 1)
    past = _scores_of_prefix(query, keys, swapped_keys)
    own_keys, own_values = (tensor.float().transpose(0, 1)[:, :, None] for tensor in (attending.key, attending.value))
    hidden = ~seen[0][:, None, None]
    if attending.chosen is not None:
        hidden = hidden | ~attending.chosen[None, :, :]
    past = scores_of(past, attending.scale, attending.softcap, hidden[..., :slots])
    suffix = scores_of(query @ own_keys.transpose(3, 4), attending.scale, attending.softcap, hidden[..., slots:])

    top = suffix.amax(-1, keepdim=True)
    if slots:
        torch.maximum(top, past.amax(-1, keepdim=True), out=top)
    if attending.sinks is not None:
        top = torch.maximum(top, attending.sinks.float().view(kv_heads, 1, -1, 1, 1))
    past.sub_(top).exp_()
    suffix.sub_(top).exp_()
    total = past.sum(-1, keepdim=True) + suffix.sum(-1, keepdim=True)
    if attending.sinks is not None:
        total += (attending.sinks.float().view(kv_heads, 1, -1, 1, 1) - top).exp()
    output = (past.flatten(1, 3) @ values.float()).view(*query.shape[:-1], -1) + suffix @ own_values
    if swapped_values is not None:
        _add_swapped(output, past, values, swapped_values)
    output /= total
    return output.transpose(0, 1).reshape(rows, heads, queries, -1).to(attending.query.dtype)


def _scores_of_prefix(
    query: Float[Tensor, "kv_heads rows groups queries d_head"],
    keys: Float[Tensor, "kv_heads slots d_head"],
    swapped: Swaps | None,
) -> Float[Tensor, "kv_heads rows groups queries slots"]:
    """Scores before scaling: all rows with the shared keys, and those of swapped keys in their place."""
    flat = query.reshape(keys.shape[0], -1, query.shape[-1])
    past = (flat @ keys.float().transpose(1, 2)).view(*query.shape[:-1], keys.shape[1])
    if swapped is not None:
        where = (slice(None), swapped.rows, slice(None), slice(None), swapped.slots)
        queries = query[:, swapped.rows].transpose(0, 1)
        scores = (queries @ swapped.content[:, :, None, :, None])[..., 0]
        past[where] = scores if swapped.readers is None else torch.where(swapped.readers, scores, past[where])
    return past


def _add_swapped(
    output: Float[Tensor, "kv_heads rows groups queries d_value"],
    weights: Float[Tensor, "kv_heads rows groups queries slots"],
    values: Float[Tensor, "kv_heads slots d_value"],
    swapped: Swaps,
) -> None:
    """Add to the output what swapped values differ by from the shared ones, times their unnormalised weights."""
    entries = weights[:, swapped.rows, :, :, swapped.slots]
    if swapped.readers is not None:
        entries = entries * swapped.readers
    difference = swapped.content - values[:, swapped.slots].float().transpose(0, 1)
    output.transpose(0, 1).index_add_(0, swapped.rows, entries[..., None] * difference[:, :, None, None, :])


def _mask(count: int, chosen: Sequence[int] | None) -> Bool[Tensor, "count"]:
    """The chosen of so many as a boolean each; None for all."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[list(range(count) if chosen is None else chosen)] = True
    return mask
