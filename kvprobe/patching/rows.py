"""Rows of one pass: many runs that equal a clean run up to the layer at which each first differs from it.

Row 0 is the clean run and goes first, alone. Every other row joins it before the first layer at which it differs, with
the clean row's residual stream: below that layer the two are the same.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.capture import editing_hook
from kvprobe.inference.forward import forward_pass, taps
from kvprobe.models.attending import Attending
from kvprobe.models.hooks import hooked
from kvprobe.models.lanes import Lanes
from kvprobe.models.rounding import difference
from kvprobe.names import one_line
from kvprobe.patching.grid import Cell
from kvprobe.text.tokens import Tokens

ROWS = 256
"""Rows to a pass: beyond it, a CPU's time for each row hardly falls."""
BYTES = 2**29
"""The memory that the rows of a pass may take together."""


class Rows:
    """Which row of a pass each run takes.

    Args:
        first_layers: the first layer at which each run differs from the clean run.

    Attributes:
        numbers: the row of each run, from 1 on.
        joining: how many rows join before each layer.
    """

    def __init__(self, first_layers: Sequence[int]) -> None:
        order = sorted(range(len(first_layers)), key=first_layers.__getitem__)
        self.numbers = [0] * len(order)
        for row, run in enumerate(order, start=1):
            self.numbers[run] = row
        self.joining: Mapping[int, int] = Counter(first_layers)

    def until(self, layer: int) -> int:
        """How many rows there are in a layer, the clean one included."""
        return 1 + sum(count for first, count in self.joining.items() if first <= layer)

    def in_order(self, logits: Float[Tensor, "rows kept vocab"]) -> Float[Tensor, "rows kept vocab"]:
        """Rows of a pass as the clean run, then each run in the order in which the runs were given."""
        return logits[torch.tensor([0, *self.numbers], device=logits.device)]


def cells_by_layer(rows: Rows, cells: Sequence[Cell]) -> defaultdict[int, list[tuple[int, Cell]]]:
    """For each layer the cells that swap something there, with their rows, in the order of the rows."""
    by_layer: defaultdict[int, list[tuple[int, Cell]]] = defaultdict(list)
    for row, cell in sorted(zip(rows.numbers, cells, strict=True), key=lambda pair: pair[0]):
        for layer in cell.layers:
            by_layer[layer].append((row, cell))
    return by_layer


def of_all_rows(attending: Attending) -> Attending:
    """The same where keys and values, or what an index chose, are those of an earlier layer, after which rows have
    joined: the first row's."""

    def all_rows(tensor: Tensor) -> Tensor:
        count = len(attending.query) - len(tensor)
        return torch.cat([tensor, tensor[:1].expand(count, -1, -1, -1)]) if count else tensor

    chosen = None if attending.chosen is None else all_rows(attending.chosen)
    return replace(attending, key=all_rows(attending.key), value=all_rows(attending.value), chosen=chosen)


def ordinary_logits(lanes: Lanes, base: KVCache, suffix: Tokens, kept: int) -> Float[Tensor, "kept vocab"]:
    """Logits after the last `kept` tokens of a suffix that is read after a base as every other text is."""
    if not 1 <= kept <= len(suffix):
        raise UserError(
            f"The metric looks at the last {kept} logits, but the suffix has {len(suffix)} tokens; give a longer "
            "suffix."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of positions, of which the caller has been warned
        return forward_pass(lanes, base, [suffix], taps(lanes, base, store=False), "plain", kept)[1][0]


def forward(
    lanes: Lanes,
    ids: Int[Tensor, "1 queries"],
    positions: Int[Tensor, "1 queries"],
    ordinary: Tensor,
    memories: Mapping[str, Any] | None = None,
) -> Float[Tensor, "rows kept vocab"]:
    """The plain lane over these tokens, with attention and rows replaced (see `Lanes.attention_replaced_by`,
    `joining`).

    Args:
        ordinary: `ordinary_logits` of the clean row.
        memories: arguments by which other memories than K and V are read; see `kvprobe.patching.memories`.

    Raises:
        UserError: the clean row computes something else, or the model cannot be run so.
    """
    name = type(lanes.plain).__name__
    # A 4-D mask is handed down unchanged, and the attention that replaces the model's ignores it.
    mask = torch.zeros(1, 1, 1, 1, dtype=lanes.dtype, device=lanes.device)
    # By their numbers: of a count of last ones Gemma 4 computes no others in the layers that share.
    last = torch.arange(ids.shape[1], device=lanes.device)[-len(ordinary) :]
    try:
        logits = lanes.plain(
            input_ids=ids,
            position_ids=positions,
            logits_to_keep=last,
            **{"attention_mask": mask, "use_cache": False, **(memories or {})},
        ).logits
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"{name} cannot be read with attention of kvprobe's making ({type(error).__name__}: {one_line(error)}); "
            "patch with KVCache.patch, one cell at a time."
        ) from error
    off = difference(logits[0].detach(), ordinary)
    if not off <= max(1e-3, lanes.tolerance()):  # a long text rounds more than the gate's few tokens
        raise UserError(
            f"{name} computes other logits with attention of kvprobe's making than when it reads the same tokens after "
            f"the same cache (off by {off:.1e}), so no effect of a patch is known; patch with KVCache.patch, one cell "
            "at a time."
        )
    return logits


@contextmanager
def joining(blocks: Sequence[nn.Module], counts: Mapping[int, int]) -> Iterator[None]:
    """While this lasts, this many copies of the first row join the batch before each layer."""

    axis = 0

    def joined(layer: int, hidden: Tensor) -> Tensor:
        nonlocal axis
        if layer == 0:
            axis = hidden.shape.index(1)  # streams may lie side by side before the rows (Gemma 3n)
        shape = [*hidden.shape]
        shape[axis] = counts.get(layer, 0)
        return torch.cat([hidden, hidden.narrow(axis, 0, 1).expand(shape)], axis) if shape[axis] else hidden

    with hooked(editing_hook(blocks[layer], "input", partial(joined, layer)) for layer in {0, *counts}):
        yield
