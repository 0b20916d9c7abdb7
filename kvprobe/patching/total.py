"""Total patching: what was swapped is seen by every token after it, the prompt's own included.

A cell overwrites K, V or an activation at slots of the prompt as they are computed, which is what `run_with_hooks` does at
`hook_rot_k`, `hook_v`, `hook_resid_pre` and their like. Tokens before the first of these slots cannot know; they are read from
the base's cache, and the prompt is computed again from there on. Rows join the pass at the first layer in which they differ,
as in `kvprobe.patching.reader`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvprobe.cache.cache import KVCache
from kvprobe.cache.visibility import visible
from kvprobe.errors import UserError
from kvprobe.inference.capture import capture, editing, plain_sites
from kvprobe.inference.forward import as_seen, new_slots
from kvprobe.inference.under_policy import tokens_at
from kvprobe.models.attending import Attending
from kvprobe.models.lanes import Lanes
from kvprobe.models.lens import Family
from kvprobe.patching.grid import ACTIVATIONS, Cell
from kvprobe.patching.reader import forward, joining
from kvprobe.text.transcript import Tokens

TOLERANCE = 1e-3
"""How far keys and values that are computed again may lie from the base's, relative to the largest."""


class Total:
    """A prompt and its suffix to be read with cells swapped as the prompt goes.

    Args:
        base: one row, keys as they are seen.
        other: the donor's K and V on the base's slots.
        donor: the donor itself, whose tokens are read again for its activations where cells swap these.
        source: the donor's slot for each of the base's, −1 where it has none.

    Raises:
        UserError: a cell swaps an activation that the plain model does not compute by itself; or the base, or a donor whose
            activations are wanted, was edited after it was read.
    """

    def __init__(
        self,
        lanes: Lanes,
        base: KVCache,
        other: KVCache,
        donor: KVCache,
        source: Int[Tensor, "slots"],
        suffix: Tokens,
        parts: set[str],
    ) -> None:
        held = ~base.ledger.padding[0]
        if not bool(base.ledger.live[..., held].all()) or bool((base.ledger.quantised >= 0).any()):
            raise UserError(
                "The base has slots that were masked or quantised after later ones had been read, so its prompt cannot be read "
                "again as it was; use reads='reader', or a base that was read in one go."
            )
        self.lanes, self.base, self.other = lanes, base, other
        self.ledger = base.ledger.append(new_slots([suffix], lanes.device))
        lanes.refuse_far_positions(self.ledger.positions)
        families: list[Family] = [family for family in ACTIVATIONS if family in parts]
        self.activations = self._of_donor(donor, source, families)
        self.sites = plain_sites(lanes, families, range(base.n_layers)) if families else {}
        for (family, layer), site in self.sites.items():
            if site is None:
                raise UserError(
                    f"The plain model does not compute {family!r} of layer {layer} by itself; leave it out."
                )

    def row_bytes(self, cells: Sequence[Cell]) -> int:
        """What a row takes at its widest: hidden states, K and V of all slots, and scores where attention is not fused."""
        shape = self.lanes.geometry
        tokens = self.ledger.slots - min((cell.slots[0] for cell in cells), default=0)
        hidden = tokens * (16 * shape.d_model + 8 * shape.n_heads * shape.d_head)
        stored = 4 * shape.n_heads * self.ledger.slots * shape.d_head
        return 4 * (hidden + stored)

    def logits(self, cells: Sequence[Cell], kept: int) -> Float[Tensor, "rows kept vocab"]:
        """Logits after the last `kept` tokens of the suffix: of the clean row, then of each cell."""
        order = sorted(range(len(cells)), key=lambda number: cells[number].layers[0])
        start = min((min(cell.slots) for cell in cells), default=self.base.slots - 1)
        run = _Pass(self, [cells[number] for number in order], start)
        tokens, positions = self.ledger.tokens[:, start:], self.ledger.positions[:, start:]
        with (
            torch.no_grad(),
            self.lanes.attention_replaced_by(run.attend),
            joining(self.lanes.blocks, run.joining),
            run.swapping(),
        ):
            found = forward(self.lanes, tokens, positions, kept)
        back = torch.empty(len(order) + 1, dtype=torch.long)
        back[0] = 0
        back[torch.tensor(order, dtype=torch.long) + 1] = torch.arange(1, len(order) + 1)
        return found[back.to(found.device)]

    def _of_donor(
        self, donor: KVCache, source: Int[Tensor, "slots"], families: Sequence[Family]
    ) -> dict[tuple[Family, int], Float[Tensor, "slots d_model"]]:
        """The donor's activations on the base's slots."""
        if not families:
            return {}
        held = (~donor.ledger.padding[0]).nonzero()[:, 0]
        captured = capture(self.lanes, [tokens_at(donor.ledger, 0, held)], families, keep_cache=True)
        assert captured.cache is not None
        stored = as_seen(self.lanes, donor)
        for layer in range(donor.n_layers):
            pairs = ((captured.cache.keys, stored.keys), (captured.cache.values, stored.values))
            refuse_changed("donor", layer, [(found[layer][0], own[layer][0, :, held]) for found, own in pairs])
        place = torch.zeros(donor.slots, dtype=torch.long, device=held.device)
        place[held] = torch.arange(len(held), device=held.device)
        rows = place[source.clamp(min=0)]
        return {site: tensor[0, rows] for site, tensor in captured.tensors.items()}


class _Pass:
    """One pass from `start` on, in which the clean row is row 0 and cells are the rows after it, by their first layer."""

    def __init__(self, total: Total, cells: Sequence[Cell], start: int) -> None:
        self.total, self.start = total, start
        self.joining: dict[int, int] = defaultdict(int)
        self.present: dict[int, list[tuple[int, Cell]]] = defaultdict(list)
        for row, cell in enumerate(cells, start=1):
            self.joining[cell.layers[0]] += 1
            for layer in cell.layers:
                self.present[layer].append((row, cell))
        queries = total.ledger.slots - start
        windows = dict.fromkeys(total.lanes.geometry.windows)
        self.seen = {window: visible(total.ledger, queries, window)[0] for window in windows}

    def attend(self, given: Attending) -> Float[Tensor, "rows heads queries d_value"]:
        total, layer, rows = self.total, given.layer, given.query.shape[0]
        base, held = total.base, ~total.base.ledger.padding[0, self.start :]
        read_again = [tensor[0, :, : base.slots - self.start][:, held] for tensor in (given.key, given.value)]
        stored = [tensor[0, :, self.start :][:, held] for tensor in (base.keys[layer], base.values[layer])]
        refuse_changed("base", layer, list(zip(read_again, stored, strict=True)))
        keys, values = given.key, given.value
        for row, cell in self.present.get(layer, []):
            heads = list(range(keys.shape[1]) if cell.kv_heads is None else cell.kv_heads)
            where = torch.tensor(cell.slots, device=keys.device)
            place = (row, torch.tensor(heads, device=keys.device)[:, None], where - self.start)
            if cell.part in ("K", "KV"):
                keys = keys.clone() if keys is given.key else keys
                keys[place] = total.other.keys[layer][0, heads][:, where]
            if cell.part in ("V", "KV"):
                values = values.clone() if values is given.value else values
                values[place] = total.other.values[layer][0, heads][:, where]
        groups = given.query.shape[1] // keys.shape[1]

        def whole(before: Tensor, own: Tensor) -> Tensor:
            both = torch.cat([before[:, :, : self.start].expand(rows, -1, -1, -1), own], 2)
            return both.repeat_interleave(groups, 1)

        keys, values = whole(total.base.keys[layer], keys), whole(total.base.values[layer], values)
        seen = self.seen[total.lanes.geometry.windows[layer]]
        if given.softcap is None:
            return scaled_dot_product_attention(given.query, keys, values, attn_mask=seen, scale=given.scale)
        scores = (given.query @ keys.transpose(2, 3) * given.scale / given.softcap).tanh() * given.softcap
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """While this lasts, activations of the rows that swap them are the donor's at their slots."""
        by_site: dict[tuple[Family, int], list[tuple[int, Cell]]] = defaultdict(list)
        for layer, entries in self.present.items():
            for row, cell in entries:
                if cell.part in ACTIVATIONS:
                    by_site[cell.part, layer].append((row, cell))
        with ExitStack() as stack:
            for site, entries in by_site.items():
                stack.enter_context(self._swapping_at(site, entries))
            yield

    @contextmanager
    def _swapping_at(self, site: tuple[Family, int], entries: Sequence[tuple[int, Cell]]) -> Iterator[None]:
        found = self.total.sites[site]
        assert found is not None
        theirs = self.total.activations[site]

        def swapped(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            for row, cell in entries:
                where = torch.tensor(cell.slots, device=tensor.device)
                tensor[row, where - self.start] = theirs[where]
            return tensor

        with editing(self.total.lanes, found, swapped):
            yield


def refuse_changed(name: str, layer: int, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse a run whose tokens, read again, do not give the K and V that it holds (found and held, of each)."""
    for found, held in pairs:
        if found.numel() and float((found - held).abs().max()) > TOLERANCE * float(held.abs().max()):
            raise UserError(
                f"Reading the {name}'s tokens again gives other K or V at layer {layer} than it holds: it was edited after it was "
                f"read (masked, evicted, damaged, patched, read in parts); use reads='reader', or a {name} read in one go."
            )
