"""Swaps: cells of one's own choosing, each measured by several metrics in one pass over the suffix."""

from collections.abc import Mapping, Sequence

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.names import unknown
from kvprobe.patching.donor import aligned
from kvprobe.patching.grid import Cell, parts_of, storing
from kvprobe.patching.metrics import KL, Metric, fitted, kept_by, measured
from kvprobe.patching.reader import Reader, suffix_after, suffixes
from kvprobe.text.tokens import Tokens


@checked_arguments
def swap_cells(
    model: Model,
    base: KVCache,
    donor: KVCache,
    suffix: Tokens | str,
    cells: Sequence[Cell],
    metrics: Mapping[str, Metric | KL],
) -> pd.DataFrame:
    """The metrics of the base's run with each cell swapped for the donor's.

    One row per cell, those of lower layers first, and `metric`: the cell's labels, its `part` and `slots` (how many),
    `value`, `base` and `donor` (the metric of either, unpatched), `effect` (value − base) and `way` (donor − base).

    Args:
        base, donor, suffix: as `patch_sweep` takes them.
        cells: their content is the donor's, or with `self` the base's own, as a control.
        metrics: by name. `KL` is that from the donor: how far the patched run still is from it.

    Raises:
        UserError: no cells or metrics, a cell of what is not there, slots that the donor has nothing for, caches that
            cannot be aligned, or a metric that is not one finite number.
    """
    if not metrics or not cells:
        raise UserError("There is nothing to measure; give at least one cell and one metric.")
    match = aligned(model, base, donor)
    if from_donor := [cell for cell in cells if cell.content == "full"]:
        match.fitted(from_donor, None)  # refuses slots that the donor has nothing for
    read = suffix_after(model, match.base, suffix)
    prepared = {name: fitted(metric, read, model.tokenizer) for name, metric in metrics.items()}
    if len(wanted := {ending.ids for _, ending in prepared.values()}) > 1:
        raise UserError(
            f"The metrics {', '.join(metrics)} need {len(wanted)} different suffixes, as LogProb reads the suffix and "
            "the answer; let the suffix end with all of the answer but its last token."
        )
    metrics = {name: metric for name, (metric, _) in prepared.items()}
    _, read = prepared[next(iter(prepared))]
    after_base, after_donor = suffixes(model, match.base, match.donor, read)
    kept = {name: kept_by(metric) for name, metric in metrics.items()}
    ends = suffix_logits(model, match.donor, after_donor, max(kept.values()))
    known = {
        name: metric.to(ends[-kept[name] :]) if isinstance(metric, KL) else metric for name, metric in metrics.items()
    }

    def values(logits: Float[Tensor, "kept vocab"]) -> dict[str, float]:
        return {name: float(measured(metric, logits[-kept[name] :])) for name, metric in known.items()}

    _refuse_unknown(model, match.base, len(after_base), cells)
    reader = Reader(model.lanes, match.base, {"full": match.cache, "self": match.base}, after_base)
    order = sorted(cells, key=lambda cell: cell.layers[0])
    start, *patched = [values(row) for rows in reader.passes(order, max(kept.values())) for row in rows]
    end = values(ends)
    table = pd.DataFrame(
        {**cell.labels, "part": cell.part, "slots": len(cell.slots), "metric": name, "value": value[name]}
        | {"base": start[name], "donor": end[name]}
        for cell, value in zip(order, patched, strict=True)
        for name in known
    )
    return table.assign(effect=table["value"] - table["base"], way=table["donor"] - table["base"])


def _refuse_unknown(model: Model, base: KVCache, queries: int, cells: Sequence[Cell]) -> None:
    """Refuse cells that name something which is not there; it would be left out in silence."""
    shape = model.geometry
    limits = {
        "layers": shape.n_layers,
        "slots": base.slots,
        "kv_heads": shape.n_kv_heads if any(cell.kv_heads is not None for cell in cells) else 0,
        "query_heads": shape.n_heads,
        "queries": queries,
    }
    for cell in cells:
        for name, count in limits.items():
            chosen = getattr(cell, name)
            if chosen is not None and (not chosen or sorted({*chosen} & {*range(count)}) != sorted(chosen)):
                raise UserError(f"A cell has {name}={str(chosen)[:40]}; give numbers from 0 to {count - 1}, each once.")
        if list(cell.layers) != sorted(cell.layers):
            raise UserError(f"A cell has layers={str(cell.layers)[:40]}; give them in order.")
        if cell.part in parts_of(base) and storing(base, cell.layers, cell.part) != tuple(cell.layers):
            raise UserError(f"Not all layers of a cell ({str(cell.layers)[:40]}) store {cell.part}; leave others out.")
        for kind, given, known in (("part", cell.part, parts_of(base)), ("content", cell.content, ("full", "self"))):
            if given not in known:
                raise UserError(unknown(kind, given, known))


@checked_arguments
def suffix_logits(model: Model, cache: KVCache, suffix: Tokens, kept: int) -> Float[Tensor, "kept vocab"]:
    """Logits after the last `kept` tokens of a suffix that is read after a cache of one row, computed as patched runs
    are."""
    return Reader(model.lanes, cache, {}, suffix).logits([], kept)[0]
