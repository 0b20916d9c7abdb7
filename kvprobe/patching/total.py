"""Total patching: what was swapped is seen by every token after it, the prompt's own included.

A cell overwrites K, V or an activation at slots of the prompt as they are computed, which is what `run_with_hooks` does
at `hook_rot_k`, `hook_v`, `hook_resid_pre` and their like. Tokens before the first of these slots are not affected;
they are read from the base's cache, and the prompt is computed again from there on. Rows join the pass at the first
layer at which they differ (`kvprobe.patching.rows`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvprobe.cache.visibility import visible_by_layer
from kvprobe.errors import UserError
from kvprobe.inference.capture import Edit, capture, editing, plain_ports
from kvprobe.inference.forward import new_slots
from kvprobe.inference.under_policy import tokens_at
from kvprobe.models.attending import Attending
from kvprobe.models.lens import Family
from kvprobe.models.ports import Port
from kvprobe.patching.grid import ACTIVATIONS, Cell
from kvprobe.patching.plan import Plan
from kvprobe.patching.rows import Rows, cells_by_layer, forward, joining, of_all_rows, ordinary_logits

TOLERANCE, HALF_PRECISION = 1e-3, 0.05
"""How far keys and values that are computed again may lie from those held, relative to the largest: in float32, and in
dtypes that round each number by up to 0.4 %."""


class TotalReader:
    """A prompt and its suffix to be read with cells swapped as the prompt is computed.

    Raises:
        UserError: a cell swaps an activation for which the plain model has no module of its own; or a donor whose
            activations are wanted was edited after it was read.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.lanes, self.base = plan, plan.lanes, plan.base
        self.donor = plan.contents["full"]
        self._ordinary: dict[int, Tensor] = {}
        self.ledger = self.base.ledger.append(new_slots([plan.suffix], self.lanes.device))
        self.lanes.refuse_far_positions(self.ledger.positions)
        parts = {cell.part for cell in plan.cells}
        families: list[Family] = [family for family in ACTIVATIONS if family in parts]
        self.activations = self._activations_of_donor(families)
        self.ports = plain_ports(self.lanes, dict.fromkeys(families, range(self.base.n_layers))) if families else {}
        for (family, layer), port in self.ports.items():
            if port is None:
                raise UserError(
                    f"The plain model does not compute {family!r} of layer {layer} by itself; leave it out."
                )

    def row_bytes(self, cells: Sequence[Cell]) -> int:
        """What a row takes at its widest: hidden states, K and V of all slots, and scores of unfused attention."""
        shape = self.lanes.geometry
        tokens = self.ledger.slots - min((cell.slots[0] for cell in cells), default=0)
        hidden = tokens * (16 * shape.d_model + 8 * shape.n_heads * shape.d_head)
        stored = 4 * shape.n_heads * self.ledger.slots * shape.d_head
        return 4 * (hidden + stored)

    def logits(self, cells: Sequence[Cell], kept: int) -> Float[Tensor, "rows kept vocab"]:
        """Logits after the last `kept` tokens of the suffix: of the clean row, then of each cell."""
        start = min((min(cell.slots) for cell in cells), default=self.base.slots - 1)
        rows = Rows([cell.layers[0] for cell in cells])
        one_pass = _Pass(self, cells_by_layer(rows, cells), start)
        self.ledger.refuse_fitted("Reading again what comes after a patch", start)
        tokens, positions = self.ledger.tokens[:, start:], self.ledger.positions[:, start:]
        if kept not in self._ordinary:
            self._ordinary[kept] = ordinary_logits(self.lanes, self.base, self.plan.suffix, kept)
        with (
            torch.no_grad(),
            self.lanes.attention_replaced_by(one_pass.attend),
            joining(self.lanes.blocks, rows.joining),
            one_pass.swapping(),
        ):
            return rows.in_order(forward(self.lanes, tokens, positions, self._ordinary[kept]))

    def _activations_of_donor(
        self, families: Sequence[Family]
    ) -> dict[tuple[Family, int], Float[Tensor, "slots d_model"]]:
        """The donor's activations on the base's slots, its tokens being read again."""
        if not families:
            return {}
        donor = self.plan.donor
        used = (~donor.ledger.padding[0]).nonzero()[:, 0]
        captured = capture(self.lanes, [tokens_at(donor.ledger, 0, used)], families, keep_cache=True)
        assert captured.cache is not None
        for layer in range(donor.n_layers):
            pairs = ((captured.cache.keys, donor.keys), (captured.cache.values, donor.values))
            again_and_held = [(again[layer][0], held[layer][0, :, used]) for again, held in pairs]
            _refuse_changed("donor", layer, again_and_held)
        # Which of the tokens read again each of the donor's slots is.
        numbers = torch.zeros(donor.slots, dtype=torch.long, device=used.device)
        numbers[used] = torch.arange(len(used), device=used.device)
        index = numbers[self.plan.sources.clamp(min=0)]
        return {place: tensor[0, index] for place, tensor in captured.tensors.items()}


class _Pass:
    """One pass from slot `start` on, with the cells of each layer by row."""

    def __init__(self, total: TotalReader, by_layer: Mapping[int, list[tuple[int, Cell]]], start: int) -> None:
        self.total, self.by_layer, self.start = total, by_layer, start
        queries = total.ledger.slots - start
        self.seen = visible_by_layer(total.ledger, queries, total.lanes.geometry.reaches)

    def attend(self, attending: Attending) -> Float[Tensor, "rows heads queries d_value"]:
        """Attention of all rows to the base before `start`, and to their own keys and values with cells swapped."""
        attending, base = of_all_rows(attending), self.total.base
        layer = self.total.lanes.geometry.reads[attending.layer]
        self._refuse_changed_base(layer, attending)
        keys = self._swapped("K", layer, attending.key)
        values = self._swapped("V", layer, attending.value)
        rows, heads = attending.query.shape[:2]

        def whole(before: Tensor, from_start: Tensor) -> Tensor:
            return torch.cat([before[:, :, : self.start].expand(rows, -1, -1, -1), from_start], 2)

        keys, values = whole(base.keys[layer], keys), whole(base.values[layer], values)
        seen, query = self.seen[layer], attending.query
        if attending.softcap is not None or attending.sinks is not None:
            return replace(attending, key=keys, value=values).output(seen).to(query.dtype)
        keys, values = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (keys, values))
        return scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=attending.scale)

    def swapping(self) -> AbstractContextManager[None]:
        """While this lasts, activations of the rows that swap them are the donor's at their slots."""
        by_place: dict[tuple[Family, int], list[tuple[int, Cell]]] = defaultdict(list)
        for layer, patched in self.by_layer.items():
            for row, cell in patched:
                for family in ACTIVATIONS:
                    if cell.part == family:
                        by_place[family, layer].append((row, cell))
        edits: list[tuple[Port, Edit]] = []
        for place, patched in by_place.items():
            port = self.total.ports[place]
            assert port is not None
            edits.append((port, self._writing(self.total.activations[place], patched)))
        return editing(self.total.lanes, edits)

    def _refuse_changed_base(self, layer: int, attending: Attending) -> None:
        """Refuse a base whose slots from `start` on, read again by the clean row, are not those that it holds."""
        base, start = self.total.base, self.start
        used = ~base.ledger.padding[0, start:]
        again = [tensor[0, :, : base.slots - start][:, used] for tensor in (attending.key, attending.value)]
        held = [tensor[0, :, start:][:, used] for tensor in (base.keys[layer], base.values[layer])]
        _refuse_changed("base", layer, list(zip(again, held, strict=True)))

    def _swapped(
        self, part: str, layer: int, tensor: Float[Tensor, "rows kv_heads queries d"]
    ) -> Float[Tensor, "rows kv_heads queries d"]:
        """K or V of a layer as they were computed, with the donor's in the rows and slots of its cells."""
        donor = (self.total.donor.keys if part == "K" else self.total.donor.values)[layer][0]
        patched = [(row, cell) for row, cell in self.by_layer.get(layer, []) if part in cell.part]
        if patched:
            tensor = tensor.clone()
        for row, cell in patched:
            heads = list(range(tensor.shape[1]) if cell.kv_heads is None else cell.kv_heads)
            slots = torch.tensor(cell.slots, device=tensor.device)
            where = (row, torch.tensor(heads, device=tensor.device)[:, None], slots - self.start)
            tensor[where] = donor[heads][:, slots]
        return tensor

    def _writing(self, activations: Float[Tensor, "slots d_model"], patched: Sequence[tuple[int, Cell]]) -> Edit:
        """For `editing`: the donor's activations in the rows and slots of these cells."""

        def write(tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            for row, cell in patched:
                slots = torch.tensor(cell.slots, device=tensor.device)
                tensor[row, slots - self.start] = activations[slots]
            return tensor

        return write


def _refuse_changed(name: str, layer: int, again_and_held: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse a run whose tokens, read again, do not give the K and V that it holds."""
    for again, held in again_and_held:
        allowed = TOLERANCE if held.dtype == torch.float32 else HALF_PRECISION
        if again.numel() and not float((again - held).abs().max()) <= allowed * float(held.abs().max()):
            raise UserError(
                f"Reading the {name}'s tokens again gives other K or V at layer {layer} than it holds: it was edited "
                "after it was read (masked, evicted, damaged, patched, read in parts); use reads='reader', or a "
                f"{name} read in one go."
            )
