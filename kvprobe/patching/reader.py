"""Reader patching: a suffix is read after a cache, once for each cell, and only the suffix sees what was swapped.

All cells are rows of one pass over the suffix. Three things make it cheap, none of them an approximation:

- The base's K and V are shared by all rows: the attention of all their queries to it is one product, and nothing is copied.
- What a row swaps is handled apart: its scores replace those of the same slots, its values are added as differences.
- Below the first layer at which a row differs from the clean run, the two are one. So the clean row goes first, alone, and
  each other row joins it there, with the clean row's residual stream.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvprobe.cache.cache import KVCache
from kvprobe.cache.visibility import visible
from kvprobe.errors import UserError
from kvprobe.inference.forward import new_slots
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.patching.grid import Cell
from kvprobe.text.transcript import Tokens


@dataclass(frozen=True)
class Swaps:
    """What some rows see at one layer in place of the base's K or V: one entry for each row and slot.

    Attributes:
        rows: of the pass.
        slots: of the base.
        content: K or V of these slots.
        readers: who of each row sees it; None where everybody does.
    """

    rows: Int[Tensor, "entries"]
    slots: Int[Tensor, "entries"]
    content: Float[Tensor, "entries kv_heads d"]
    readers: Bool[Tensor, "entries kv_heads groups queries"] | None


class Reader:
    """A suffix to be read after a base, with cells of it swapped.

    Args:
        base: one row, keys as they are seen.
        others: what cells may hold instead, by `Cell.content`; each on the base's slots.
    """

    def __init__(self, lanes: Lanes, base: KVCache, others: Mapping[str, KVCache], suffix: Tokens) -> None:
        self.lanes, self.base, self.others = lanes, base, others
        self.new = new_slots([suffix], lanes.device)
        self.ledger = base.ledger.append(self.new)
        lanes.refuse_far_positions(self.new.positions)
        shape = lanes.geometry
        self.groups = shape.n_heads // shape.n_kv_heads
        self.queries = len(suffix)
        windows = dict.fromkeys(shape.windows)
        seen = {window: visible(self.ledger, self.queries, window) for window in windows}
        self._seen = [seen[window] for window in shape.windows]

    def row_bytes(self, cells: Sequence[Cell]) -> int:
        """What a row takes at its widest: scores, their exponentials and masks, and its share of what is swapped."""
        shape = self.lanes.geometry
        swapped = max((len(cell.slots) for cell in cells), default=0)
        scores = shape.n_heads * self.queries * (self.base.slots + self.queries)
        vectors = shape.n_heads * self.queries * shape.d_head
        hidden = self.queries * (12 * shape.d_model + 8 * shape.n_heads * shape.d_head)
        return 4 * (3 * scores + (2 * swapped + 6) * vectors + hidden)

    def logits(self, cells: Sequence[Cell], kept: int) -> Float[Tensor, "rows kept vocab"]:
        """Logits after the last `kept` tokens of the suffix: of the clean row, then of each cell."""
        order = sorted(range(len(cells)), key=lambda number: cells[number].layers[0])
        run = _Pass(self, [cells[number] for number in order])
        with torch.no_grad(), self.lanes.attention_replaced_by(run.attend), joining(self.lanes.blocks, run.joining):
            found = forward(self.lanes, self.new.tokens, self.new.positions, kept)
        back = torch.empty(len(order) + 1, dtype=torch.long)
        back[0] = 0
        back[torch.tensor(order, dtype=torch.long) + 1] = torch.arange(1, len(order) + 1)
        return found[back.to(found.device)]

    def seen(self, layer: int) -> Bool[Tensor, "kv_heads queries slots"]:
        """Which slots, the suffix's own included, each query may attend to; one KV head where all agree."""
        live = self._seen[layer]
        return live[layer if live.shape[0] > 1 else 0, 0]

    def swaps(self, layer: int, cells: Sequence[tuple[int, Cell]], part: str) -> Swaps | None:
        """What these rows (by number, with their cells) see at a layer in place of the base's K or V."""
        entries = [(row, cell) for row, cell in cells if layer in cell.layers and part in cell.part]
        if not entries:
            return None
        device = self.lanes.device
        lengths = torch.tensor([len(cell.slots) for _, cell in entries])
        rows = torch.tensor([row for row, _ in entries]).repeat_interleave(lengths).to(device)
        slots = torch.tensor([slot for _, cell in entries for slot in cell.slots], device=device)
        names = list(dict.fromkeys(cell.content for _, cell in entries))
        tensors = torch.stack(
            [(other.keys if part == "K" else other.values)[layer][0] for other in map(self.others.__getitem__, names)]
        )
        which = torch.tensor([names.index(cell.content) for _, cell in entries]).repeat_interleave(lengths).to(device)
        readers = None
        if any(_chosen(cell) for _, cell in entries):
            masks = torch.stack([self._readers(cell) for _, cell in entries])
            readers = masks.repeat_interleave(lengths, 0).to(device)
        return Swaps(rows, slots, tensors[which, :, slots].float(), readers)

    def _readers(self, cell: Cell) -> Bool[Tensor, "kv_heads groups queries"]:
        shape = self.lanes.geometry
        heads = torch.zeros(shape.n_heads, dtype=torch.bool)
        heads[list(range(shape.n_heads) if cell.query_heads is None else cell.query_heads)] = True
        queries = torch.zeros(self.queries, dtype=torch.bool)
        queries[list(range(self.queries) if cell.queries is None else cell.queries)] = True
        mask = (heads[:, None] & queries).view(shape.n_kv_heads, self.groups, self.queries)
        if cell.kv_heads is not None:
            owned = torch.zeros(shape.n_kv_heads, dtype=torch.bool)
            owned[list(cell.kv_heads)] = True
            mask = mask & owned[:, None, None]
        return mask


class _Pass:
    """The attention of one pass, in which the clean row is row 0 and cells are the rows after it, by their first layer."""

    def __init__(self, reader: Reader, cells: Sequence[Cell]) -> None:
        self.reader = reader
        self.joining: dict[int, int] = defaultdict(int)
        self.present: dict[int, list[tuple[int, Cell]]] = defaultdict(list)
        """Cells of each layer, by row."""
        for row, cell in enumerate(cells, start=1):
            self.joining[cell.layers[0]] += 1
            for layer in cell.layers:
                self.present[layer].append((row, cell))

    def attend(self, given: Attending) -> Float[Tensor, "rows heads queries d_value"]:
        reader, layer = self.reader, given.layer
        cells = self.present.get(layer, [])
        return attention(
            given,
            reader.base.keys[layer][0],
            reader.base.values[layer][0],
            reader.seen(layer),
            reader.swaps(layer, cells, "K"),
            reader.swaps(layer, cells, "V"),
        )


def attention(
    given: Attending,
    keys: Float[Tensor, "kv_heads slots d_head"],
    values: Float[Tensor, "kv_heads slots d_value"],
    seen: Bool[Tensor, "kv_heads_or_1 queries all_slots"],
    swapped_keys: Swaps | None = None,
    swapped_values: Swaps | None = None,
) -> Float[Tensor, "rows heads queries d_value"]:
    """Attention of all rows to a prefix that they share and each to its own tokens, in fp32.

    The two parts are softmaxed under one maximum and one sum, so the result is that of attention to both together.
    """
    rows, heads, queries, _ = given.query.shape
    kv_heads, slots = keys.shape[0], keys.shape[1]
    query = given.query.float().view(rows, kv_heads, heads // kv_heads, queries, -1).transpose(0, 1)
    flat = query.reshape(kv_heads, -1, query.shape[-1])
    past = (flat @ keys.float().transpose(1, 2)).view(*query.shape[:-1], slots)
    if swapped_keys is not None:
        where = (slice(None), swapped_keys.rows, slice(None), slice(None), swapped_keys.slots)
        asking = query[:, swapped_keys.rows].transpose(0, 1)
        scores = (asking @ swapped_keys.content[:, :, None, :, None])[..., 0]
        past[where] = scores if swapped_keys.readers is None else torch.where(swapped_keys.readers, scores, past[where])
    own_keys, own_values = (each.float().transpose(0, 1)[:, :, None] for each in (given.key, given.value))
    own = query @ own_keys.transpose(3, 4)

    hidden = ~seen[:, None, None]
    for scores, unseen in ((past, hidden[..., :slots]), (own, hidden[..., slots:])):
        scores *= given.scale
        if given.softcap is not None:
            scores.div_(given.softcap).tanh_().mul_(given.softcap)
        if bool(unseen.any()):
            scores.masked_fill_(unseen, -torch.inf)

    top = own.amax(-1, keepdim=True)
    if slots:
        torch.maximum(top, past.amax(-1, keepdim=True), out=top)
    past.sub_(top).exp_()
    own.sub_(top).exp_()
    total = past.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
    found = (past.view(kv_heads, -1, slots) @ values.float()).view(*query.shape[:-1], -1) + own @ own_values
    if swapped_values is not None:
        weights = past[:, swapped_values.rows, :, :, swapped_values.slots]
        if swapped_values.readers is not None:
            weights = weights * swapped_values.readers
        moved = swapped_values.content - values[:, swapped_values.slots].float().transpose(0, 1)
        change = weights[..., None] * moved[:, :, None, None, :]
        found.transpose(0, 1).index_add_(0, swapped_values.rows, change)
    found /= total
    return found.transpose(0, 1).reshape(rows, heads, queries, -1).to(given.query.dtype)


def forward(
    lanes: Lanes, ids: Int[Tensor, "1 queries"], positions: Int[Tensor, "1 queries"], kept: int
) -> Float[Tensor, "rows kept vocab"]:
    """The plain lane over these tokens, with attention and rows of our own making (see `Lanes.attention_replaced_by`, `joining`)."""
    if not 1 <= kept <= ids.shape[1]:
        raise UserError(f"The metric looks at the last {kept} logits, but the suffix has {ids.shape[1]} tokens.")
    # A 4-D mask is handed down as it is; nobody reads it.
    mask = torch.zeros(1, 1, 1, 1, dtype=lanes.dtype, device=lanes.device)
    return lanes.plain(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False, logits_to_keep=kept
    ).logits


@contextmanager
def joining(blocks: Sequence[nn.Module], counts: Mapping[int, int]) -> Iterator[None]:
    """While this lasts, so many copies of the first row join the batch before each layer."""

    def joiner(count: int) -> Any:
        def join(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden = args[0] if args else kwargs["hidden_states"]
            grown = torch.cat([hidden, hidden[:1].expand(count, -1, -1)])
            if args:
                return (grown, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": grown}

        return join

    handles = [
        blocks[layer].register_forward_pre_hook(joiner(count), with_kwargs=True)
        for layer, count in counts.items()
        if count
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _chosen(cell: Cell) -> bool:
    """Whether only some heads or tokens see what the cell swaps."""
    return cell.kv_heads is not None or cell.query_heads is not None or cell.queries is not None
