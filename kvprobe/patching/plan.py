"""The plan of a sweep: what is swapped into what, refused and aligned once, before anything is run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import INDEX, WRITES, recurrent
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.models.lanes import Lanes
from kvprobe.patching.along import Along, contents, split
from kvprobe.patching.donor import Align, aligned
from kvprobe.patching.grid import ACTIVATIONS, LATENT_PARTS, Bounds, Cell, Over, grid, stored_parts
from kvprobe.patching.metrics import KL, Metric, fitted
from kvprobe.patching.reader import suffix_after, suffixes
from kvprobe.text.tokens import Tokens

Reads = Literal["reader", "total"]
"""Who sees what was swapped. `reader`: only the suffix, as if the cache had been edited after the prompt was read.
`total`: the prompt's tokens after the patched slot too, as activation patching in `run_with_hooks` does."""


@dataclass(frozen=True)
class Plan:
    """A base, what may be swapped into it, and the cells of a grid over it.

    Attributes:
        base: one row, with keys at the positions at which they are seen.
        donor: the donor's own run, likewise.
        contents: what a cell may hold in the base's slots, by `Cell.content`.
        sources: the donor's slot for each of the base's; −1 where it has none.
        suffix: what is read after the base.
        donor_suffix: the same tokens where the donor ends.
    """

    lanes: Lanes
    base: KVCache
    donor: KVCache
    contents: Mapping[str, KVCache]
    sources: Int[Tensor, "slots"]
    suffix: Tokens
    donor_suffix: Tokens
    cells: tuple[Cell, ...]
    reads: Reads

    @classmethod
    def of(
        cls,
        model: Model,
        base: KVCache,
        donor: KVCache,
        suffix: Tokens | str,
        metric: Metric | KL,
        over: Over,
        parts: Sequence[str] | None,
        reads: Reads,
        align: Align,
        along: Along | None,
    ) -> "tuple[Plan, Metric | KL]":
        """The plan of a sweep, and its metric in tokens; see `patch_sweep` for the arguments and for what is
        refused."""
        match = aligned(model, base, donor, align)
        metric, suffix = fitted(metric, suffix_after(model, base, suffix), model.tokenizer)
        after_base, after_donor = suffixes(model, base, donor, suffix)
        shape = model.geometry
        kv_heads = shape.n_kv_heads if "head" in over else 0  # layers may differ in them
        bounds = Bounds(shape.n_layers, kv_heads, shape.n_heads, len(after_base))
        cells = match.fitted(grid(match.base, bounds, over, parts, contents(along)), align)
        _refuse_unreadable(match.base, cells, reads)
        plan = cls(
            lanes=model.lanes,
            base=match.base,
            donor=match.donor,
            contents={"full": match.cache} if along is None else split(match.base, match.cache, along),
            sources=match.source,
            suffix=after_base,
            donor_suffix=after_donor,
            cells=tuple(cells),
            reads=reads,
        )
        return plan, metric

    def only(self, numbers: Sequence[int]) -> "Plan":
        """The same plan for some of its cells."""
        return replace(self, cells=tuple(self.cells[number] for number in numbers))


def _refuse_unreadable(base: KVCache, cells: Sequence[Cell], reads: Reads) -> None:
    """Refuse what only the other way to read can do."""
    for cell in cells:
        if reads == "reader" and cell.part in ACTIVATIONS:
            raise UserError(
                f"{cell.part!r} is not part of a cache; swap K or V, or patch activations with reads='total'."
            )
        if reads == "total" and (cell.query_heads is not None or cell.queries is not None or cell.content != "full"):
            raise UserError(
                "With reads='total' a cell is swapped in full and for all readers; leave out the axes 'query_head' and "
                "'query' and the subspace `along`, or use reads='reader'."
            )
        if reads == "total" and (any(map(recurrent, base.layers)) or cell.part in LATENT_PARTS or INDEX in cell.part):
            raise UserError(
                "With reads='total' no latents can be swapped, and no models read that keep states; use reads='reader'."
            )
        apart = (cell.kv_heads, cell.query_heads, cell.queries) != (None, None, None) or cell.content == "along"
        if apart and not {*stored_parts(cell.part)}.isdisjoint((*WRITES, INDEX)):
            raise UserError(
                f"All heads and queries read {cell.part!r} alike, in a state or by an index; leave out the axes "
                "'head', 'query_head' and 'query' and the subspace `along`, or swap what is attended to alone."
            )
        if cell.part in ACTIVATIONS and cell.kv_heads is not None:
            raise UserError(f"{cell.part!r} has no KV heads; leave the axis 'head' out.")
    ledger = base.ledger
    used = ~ledger.padding[0]
    if reads == "total" and not (bool(ledger.live[..., used].all()) and bool((ledger.quantised < 0).all())):
        raise UserError(
            "The base has slots that were masked or quantised after later ones had been read, so its prompt cannot "
            "be read again as it was; use reads='reader', or a base that was read in one go."
        )
