"""One call for every cell of a grid: swap K, V or both from a donor into a base, and see what it does to the answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import psutil
import torch
from tqdm import tqdm

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.forward import as_seen, one_row_each
from kvprobe.inference.model import Model
from kvprobe.models.lanes import Lanes
from kvprobe.names import unknown
from kvprobe.patching.along import Along, contents, split
from kvprobe.patching.donor import Align, Aligned, aligned, refuse_unlike
from kvprobe.patching.grid import ACTIVATIONS, Bounds, Cell, Over, grid
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, Metric, kept_by, measured
from kvprobe.patching.reader import Reader
from kvprobe.patching.total import Total
from kvprobe.text.transcript import Tokens

Reads = Literal["reader", "total"]
"""Who sees what was swapped: only the suffix, as if the cache had been edited after the prompt was read; or also the
prompt's tokens after the patched slot, as if it had been so from the start, which is what activation patching in
`run_with_hooks` does."""

ROWS = 256
"""Rows to a pass: beyond it, a CPU's time for each row hardly falls."""
BYTES = 2**29
"""And no more of them than this much memory holds."""


Sweeper = Reader | Total
"""What runs cells: the clean row, and one row for each."""


def patch_sweep(
    model: Model,
    base: KVCache,
    donor: KVCache,
    suffix: Tokens | str,
    metric: Metric | KL,
    over: Over = ("layer", "segment"),
    *,
    parts: Sequence[str] = ("K", "V", "KV"),
    reads: Reads = "reader",
    align: Align = None,
    along: Along | None = None,
    rows: int = ROWS,
    progress: bool = True,
) -> PatchMap:
    """The metric of the base's run with each cell of a grid swapped for the donor's.

    With a clean donor this is denoising (which cells restore the answer?), with a clean base noising (which cells, if
    spoilt, lose it?): swap `base` and `donor` for the other.

    Args:
        base: a cache of one row, the run that is patched into.
        donor: a cache of one row, whose K and V are swapped in. See `kvprobe.patching.aligned` for which slots stand for which.
        suffix: what is read after the cut; a text is read where the base ends.
        metric: of the logits after the suffix; see `kvprobe.patching.metrics`.
        over: axes of the grid, of `layer`, `band`, `slot`, `segment`, `head`, `query_head`, `query`; or for each axis the values
            to go over, None for all (a band is a range of layers). An axis that is not named is taken whole.
        parts: what a cell swaps: K, V, or both (KV); with reads="total" also resid_pre, resid_mid, resid_post, attn_out, mlp_out.
        reads: see `Reads`. `total` reads the prompt again from the first patched slot on.
        align: how segments of unequal length meet: `start`, `end`, or None to refuse them.
        along: a subspace; each cell is then swapped in full, along it, and outside it (see `kvprobe.patching.along`).
        rows: most cells to a pass.

    Raises:
        UserError: caches of several rows or of another model, segments of unequal length, an axis, layer, slot, segment, head
            or part that does not exist, a metric that is not one number; or for `total`, a base whose slots were not all read
            in one go (masked, evicted, damaged).
    """
    if reads not in get_args(Reads):
        raise UserError(unknown("way to read", reads, get_args(Reads)))
    if rows < 1:
        raise UserError(f"There are rows={rows} cells to a pass; give at least one.")
    lanes = model.lanes
    prepared = prepare(model, base, donor, suffix, over, parts, align, along)
    _refuse_unreadable(prepared.cells, reads)
    if reads == "reader":
        sweeper = Reader(lanes, prepared.base, prepared.others, prepared.suffix)
    else:
        matched, told = prepared.aligned, {cell.part for cell in prepared.cells}
        sweeper = Total(lanes, prepared.base, matched.cache, donor, matched.source, prepared.suffix, told)
    return exact(sweeper, lanes, donor, prepared, metric, reads, rows, progress)


@dataclass(frozen=True)
class Prepared:
    """A base, what may be swapped into it, and the cells of a grid over it.

    Attributes:
        base: keys as they are seen.
        others: what cells may hold, by `Cell.content`.
    """

    base: KVCache
    aligned: Aligned
    others: dict[str, KVCache]
    suffix: Tokens
    cells: list[Cell]


def prepare(
    model: Model,
    base: KVCache,
    donor: KVCache,
    suffix: Tokens | str,
    over: Over,
    parts: Sequence[str],
    align: Align,
    along: Along | None,
) -> Prepared:
    """The base and donor slot by slot, and the grid's cells; see `patch_sweep` for what is refused."""
    refuse_unlike(base, donor)
    one_row_each(model.lanes, base, 1)
    read = model.tokens_after(base, suffix)
    if len(read) != 1 or not len(read[0]):
        raise UserError("There is nothing to read after the cut; give a suffix of at least one token.")
    base = as_seen(model.lanes, base)
    matched = aligned(model.lanes, base, donor, align)
    shape = model.geometry
    bounds = Bounds(shape.n_layers, shape.n_kv_heads, shape.n_heads, len(read[0]))
    cells = matched.fitted(grid(base, bounds, over, parts, contents(along)), align)
    others = {"full": matched.cache} if along is None else split(base, matched.cache, along)
    return Prepared(base, matched, others, read[0], cells)


def exact(
    sweeper: Sweeper,
    lanes: Lanes,
    donor: KVCache,
    prepared: Prepared,
    metric: Metric | KL,
    reads: Reads,
    rows: int = ROWS,
    progress: bool = False,
) -> PatchMap:
    """The metric with each of the prepared cells patched, chunk by chunk."""
    cells = prepared.cells
    kept = kept_by(metric)
    first = sweeper.logits([], kept)[0]
    metric = metric.to(first) if isinstance(metric, KL) else metric
    end = donor_value(lanes, donor, prepared, metric, kept)
    values = np.empty(len(cells))
    # Cells that begin at the same slot and layer stand together: they share most of what is read again.
    order = sorted(range(len(cells)), key=lambda number: (reads == "total" and min(cells[number].slots), number))
    with tqdm(total=len(cells), desc="Patching", unit="cell", disable=not progress) as bar:
        while order:
            count = _fitting(sweeper, [cells[number] for number in order[:rows]], lanes.device)
            chunk, order = order[:count], order[count:]
            logits = sweeper.logits([cells[number] for number in chunk], kept)
            for number, own in zip(chunk, logits[1:], strict=True):
                values[number] = float(measured(metric, own))
            bar.update(count)
    return PatchMap(tuple(cells), values, float(measured(metric, first)), end, prepared.base.ledger, reads)


def donor_value(lanes: Lanes, donor: KVCache, prepared: Prepared, metric: Metric, kept: int) -> float:
    """The metric of the donor's own run: the suffix read where the donor ends."""
    shift = int(donor.ledger.following[0] - prepared.base.ledger.following[0])
    suffix = prepared.suffix.shifted(prepared.suffix.positions[0] + shift)
    return float(measured(metric, Reader(lanes, as_seen(lanes, donor), {}, suffix).logits([], kept)[0]))


def _fitting(sweeper: Sweeper, cells: Sequence[Cell], device: torch.device) -> int:
    """How many of these cells a pass has room for."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return max(1, min(len(cells), int(min(BYTES, free / 4) / sweeper.row_bytes(cells)) - 1))


def _refuse_unreadable(cells: Sequence[Cell], reads: Reads) -> None:
    """Refuse what only the other way to read can do."""
    for cell in cells:
        if reads == "reader" and cell.part in ACTIVATIONS:
            raise UserError(
                f"{cell.part!r} is no part of a cache; swap K or V, or patch activations with reads='total'."
            )
        if reads == "total" and (cell.query_heads is not None or cell.queries is not None or cell.content != "full"):
            raise UserError("Who reads and along what is told only with reads='reader'; leave those axes out.")
        if cell.part in ACTIVATIONS and cell.kv_heads is not None:
            raise UserError(f"{cell.part!r} has no KV heads; leave the axis 'head' out.")
