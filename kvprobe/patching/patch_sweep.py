"""One call for every cell of a grid: swap K, V or both from a donor into a base, and measure the answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.executors import Executor
from kvprobe.inference.elsewhere import each, shares
from kvprobe.inference.model import Model
from kvprobe.patching.along import Along
from kvprobe.patching.donor import Align
from kvprobe.patching.grid import Over
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, Metric
from kvprobe.patching.plan import Plan, Reads
from kvprobe.patching.rows import ROWS
from kvprobe.patching.run import Runs, run
from kvprobe.text.tokens import Tokens


@checked_arguments
def patch_sweep(
    model: Model,
    base: KVCache,
    donor: KVCache,
    suffix: Tokens | str,
    metric: Metric | KL,
    over: Over = ("layer", "segment"),
    *,
    parts: Sequence[str] | None = None,
    reads: Reads = "reader",
    align: Align = None,
    along: Along | None = None,
    rows: int = ROWS,
    progress: bool = True,
    executor: Executor | None = None,
) -> PatchMap:
    """The metric of the base's run with each cell of a grid swapped for the donor's.

    With a clean donor this is denoising (which cells restore the answer?). With a clean base it is noising (which cells
    lose the answer if they are corrupted?). Swap `base` and `donor` to change from one to the other.

    Args:
        base: a cache of one row, the run that is patched into.
        donor: a cache of one row, whose K and V are swapped in. See `kvprobe.patching.aligned` for which slots stand
            for which.
        suffix: what is read after the cut; a text is read where the base ends.
        metric: of the logits after the suffix; see `kvprobe.patching.metrics`.
        over: axes of the grid, of `layer`, `band`, `slot`, `segment`, `head`, `query_head`, `query`; or for each axis
            the values to go over, None for all (a band is a range of layers). An axis that is not named is taken whole.
        parts: what a cell swaps: K, V, or both (KV); with reads="total" also resid_pre, resid_mid, resid_post,
            attn_out, mlp_out; with latent attention the latent, the rotated key (rope), or both (latent+rope); where
            layers keep states what tokens wrote (writes), both (KV+writes), or one part of it (key, value …). A cell
            means the layers that store its part. Or TransformerLens' names of sites, such as `blocks.3.attn.hook_v`,
            each of which names its layer: the axis `layer` is then these. All of the model by default.
        reads: see `Reads`. `total` reads the prompt again from the first patched slot on.
        align: how segments of unequal length meet: `start`, `end`, or None to refuse them.
        along: a subspace; each cell is then swapped in full, along it, and outside it (see `kvprobe.patching.along`).
        rows: most cells to a pass.
        executor: where passes are run side by side, see `kvprobe.executors`; here by default. Numbers are the same in
            float32 on machines of one kind, where memory allows passes of as many rows.

    Raises:
        UserError: caches of several rows or of another model, segments of unequal length, an axis, layer, slot,
            segment, head or part that does not exist, a metric that is not one number; or for `total`, a base whose
            slots were not all read in one go (masked, evicted, damaged).
    """
    if rows < 1:
        raise UserError(f"A pass must hold at least one cell; got rows={rows}.")
    asked = (over, parts, reads, align, along)
    plan, fitted = Plan.of(model, base, donor, suffix, metric, *asked)
    if executor is None:
        return run(plan, fitted, rows, progress)

    def elsewhere(order: Sequence[int]) -> list[Float[np.ndarray, "some"]]:
        some, given = shares(order, executor, rows), (base, donor, suffix, metric, rows, asked)
        return each(model, patched, some, *given, executor=executor, doing="Patching", unit="share", progress=progress)

    return run(plan, fitted, rows, elsewhere=elsewhere)


def patched(
    model: Model,
    numbers: Sequence[int],
    base: KVCache,
    donor: KVCache,
    suffix: Tokens | str,
    metric: Metric | KL,
    rows: int,
    asked: tuple[Any, ...],
) -> Float[np.ndarray, "some"]:
    """The metric of some cells of a sweep, by number, in a process of its own."""
    return Runs(*Plan.of(model, base, donor, suffix, metric, *asked)).values(numbers, rows, progress=False)
