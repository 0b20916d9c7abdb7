"""Attribution patching: what every cell would do, to first order, from one pass over the suffix and back.

Two scores for each cell. `linear` is the gradient of the metric at K or V of the slot times what the donor would change
there (Nanda 2023, "Attribution patching"). It fails for K where the softmax is saturated: a slot without attention has
no gradient, even where the donor's key would draw all of it. `score` therefore computes the attention of the patched
layer exactly, and is first order only from that layer's attention output on (AtP*: Kramár et al. 2024, arXiv
2403.00745). For V alone the two are the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, checked_arguments
from kvprobe.brief import Brief, brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.parts import KV
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.models.attending import Attending
from kvprobe.patching.along import Along
from kvprobe.patching.donor import Align
from kvprobe.patching.grid import LATENT_PARTS, Cell, Over, seen_in
from kvprobe.patching.maps import PatchMap
from kvprobe.patching.metrics import KL, UNDEFINED, Metric, kept_by, measured
from kvprobe.patching.plan import Plan
from kvprobe.patching.reader import Reader
from kvprobe.patching.rows import forward
from kvprobe.patching.run import run
from kvprobe.text.tokens import Tokens

CHUNK = 64
"""Cells of a layer whose attention is computed at once."""


@dataclass(frozen=True, repr=False)
class Attribution(Brief):
    """First-order effects of all cells, and how they agree with exact patching where that was run.

    Attributes:
        cells: the grid.
        score: effect on the metric, exact through the patched layer's attention.
        linear: effect by the gradient at K and V alone; NaN where only some heads or tokens read the cell.
        base: the metric of the base.
        donor: the metric of the donor.
        checked: exact patching of a random sample of the cells.
        sample: the numbers of these cells in the grid.
    """

    cells: tuple[Cell, ...]
    score: Float[np.ndarray, "cells"]
    linear: Float[np.ndarray, "cells"]
    base: float
    donor: float
    checked: PatchMap
    sample: tuple[int, ...]

    def _facts(self) -> Iterable[str]:
        yield f"{len(self.cells)} cells, {len(self.sample)} of them checked"
        yield f"agreement={brief(self.agreement)}, overlap={brief(self.overlap)}"
        yield f"base={self.base:.4g}, donor={self.donor:.4g}"
        if not self.checked.way:
            yield UNDEFINED

    @property
    def map(self) -> PatchMap:
        """The scores as a map, to be drawn and tabled as that of exact patching."""
        return replace(self.checked, cells=self.cells, values=self.base + self.score)

    @property
    def agreement(self) -> dict[str, float]:
        """Spearman's rank correlation of each score with the exact effect, on the sample; NaN where either is
        constant. Most cells do hardly anything, and their order counts as much as that of the others: see
        `overlap`."""
        truth = pd.Series(self.checked.effect).rank()
        return {name: float(pd.Series(score).rank().corr(truth)) for name, score in self._sampled.items()}

    @property
    def overlap(self) -> dict[str, float]:
        """Which share of the cells with the largest exact effects (in size; a tenth of the sample) each score puts
        among its own largest; a score that knows nothing finds a tenth. NaN where the score is."""
        count = max(1, len(self.sample) // 10)
        top = set(np.argsort(-np.abs(self.checked.effect), kind="stable")[:count].tolist())
        return {
            name: len(top & set(np.argsort(-np.abs(score), kind="stable")[:count].tolist())) / count
            if np.isfinite(score).all()
            else np.nan
            for name, score in self._sampled.items()
        }

    @property
    def _sampled(self) -> dict[str, Float[np.ndarray, "sample"]]:
        """Each score of the cells that were checked."""
        sample = list(self.sample)
        return {"score": self.score[sample], "linear": self.linear[sample]}

    def df(self) -> pd.DataFrame:
        """One row per cell: as `PatchMap.df`, with `score`, `linear`, and the exact `effect` where it was checked."""
        effect = np.full(len(self.cells), np.nan)
        effect[list(self.sample)] = self.checked.effect
        table = self.map.df().drop(columns=["value", "normalised"])
        return table.assign(score=self.score, linear=self.linear, effect=effect)


@checked_arguments
def attribute(
    model: Model,
    base: KVCache,
    donor: KVCache,
    suffix: Tokens | str,
    metric: Metric | KL,
    over: Over = ("layer", "slot"),
    *,
    parts: Sequence[str] = ("K", "V"),
    align: Align = None,
    along: Along | None = None,
    check: AtLeastOne = 64,
    seed: AtLeastZero = 0,
) -> Attribution:
    """First-order effects of every cell of a grid, for a reader of the suffix; see `patch_sweep` for the arguments.

    Args:
        metric: must be differentiable, and have a slope at the base: KL from the base has none.
        check: cells that are also patched exactly, drawn at random.
        seed: of that draw.

    Raises:
        UserError: as `patch_sweep`; or the metric is flat at the base, or `check` is no number of cells.
    """
    if model.geometry.recurrent or model.geometry.indexed:
        raise UserError(
            f"{type(model.lanes.plain).__name__} keeps states, or attends to what an index chooses, of which "
            "attribution knows no slopes; use patch_sweep."
        )
    if isinstance(metric, KL):
        raise UserError(
            "KL from the base is flat at the base, so its gradient is zero; attribute a logit difference or a "
            "log-probability."
        )
    plan, fitted = Plan.of(model, base, donor, suffix, metric, over, parts, "reader", align, along)
    scored = cast(Metric, fitted)
    slopes = _Slopes(Reader(plan.lanes, plan.base, plan.contents, plan.suffix))
    value = slopes.back(scored)
    score, linear = _scores(slopes, plan.cells)
    rng = np.random.default_rng(seed)
    sample = tuple(sorted(rng.permutation(len(plan.cells))[:check].tolist()))
    checked = run(plan.only(sample), fitted)
    return Attribution(plan.cells, score, linear, value, checked.donor, checked, sample)


def _scores(slopes: "_Slopes", cells: Sequence[Cell]) -> tuple[Float[np.ndarray, "cells"], Float[np.ndarray, "cells"]]:
    """`score` and `linear` of each cell, summed over its layers."""
    score, linear = np.zeros(len(cells)), np.zeros(len(cells))
    by_layer: dict[int, list[int]] = defaultdict(list)
    for number, cell in enumerate(cells):
        for layer in cell.layers:
            by_layer[layer].append(number)
    for layer, numbers in by_layer.items():
        for first in range(0, len(numbers), CHUNK):
            chunk = numbers[first : first + CHUNK]
            score[chunk] += slopes.exact_attention(layer, [cells[number] for number in chunk])
        linear[numbers] += slopes.linear(layer, [cells[number] for number in numbers])
    return score, linear


class _Slopes:
    """The clean run over the suffix, and the metric's gradient at each layer's K, V and attention output."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.clean: dict[int, Attending] = {}
        self.outputs: dict[int, Tensor] = {}
        self.keys, self.values = (
            {layer: tensor.detach().float().requires_grad_() for layer, tensor in reader.heads[part].items()}
            for part in KV
        )

    def back(self, metric: Metric) -> float:
        """Read the suffix, and go back from the metric."""
        reader = self.reader
        ordinary = reader.ordinary(kept_by(metric))
        with torch.enable_grad(), reader.lanes.attention_replaced_by(self._attend):
            logits = forward(reader.lanes, reader.new.tokens, reader.new.positions, ordinary)[0]
            value = measured(metric, logits)
            if not value.requires_grad:
                raise UserError("The metric has no gradient; compute it from the logits in torch, without float().")
            tensors = (self.outputs, self.keys, self.values)
            slopes = torch.autograd.grad(value, [one for of in tensors for one in of.values()], allow_unused=True)
        left = iter(slopes)
        self.slopes, self.key_slopes, self.value_slopes = ({layer: next(left) for layer in of} for of in tensors)
        if all(slope is None or not bool(slope.any()) for slope in slopes):
            raise UserError("The metric is flat at the base, so its gradient is zero; give one that has a slope there.")
        return float(value.detach())

    def exact_attention(self, layer: int, cells: Sequence[Cell]) -> Float[np.ndarray, "cells"]:
        """The change of the attention output of all layers that read this one, each cell patched, times the slope
        there."""
        layers = self.reader.lanes.geometry.readers[layer]
        return np.sum([self._exact_attention(at, layer, cells) for at in layers], 0)

    def _exact_attention(self, at: int, layer: int, cells: Sequence[Cell]) -> Float[np.ndarray, "cells"]:
        reader, clean, slope = self.reader, self.clean[at], self.slopes[at]
        if slope is None:
            return np.zeros(len(cells))
        rows = list(enumerate(cells))

        def repeated(tensor: Tensor) -> Tensor:
            return tensor.detach().expand(len(cells), -1, -1, -1)

        attending = replace(clean, query=repeated(clean.query), key=repeated(clean.key), value=repeated(clean.value))
        swaps = (reader.swaps(layer, rows, "K"), reader.swaps(layer, rows, "V"))
        with torch.no_grad():
            moved = reader.attention(attending, *swaps) - self.outputs[at]
            return (moved.float() * slope.float()).flatten(1).sum(1).double().cpu().numpy()

    def linear(self, layer: int, cells: Sequence[Cell]) -> Float[np.ndarray, "cells"]:
        """The change of the layer's K and V times the slope there."""
        names = [self.reader.content(cell) for cell in cells]
        tables = self._first_order(layer, names)
        effects = []
        for cell, name in zip(cells, names, strict=True):
            if cell.query_heads is not None or cell.queries is not None:
                effects.append(np.nan)
                continue
            whole, slots = cell.kv_heads is None or cell.part in LATENT_PARTS, list(cell.slots)
            heads = list(range(len(self.keys[layer])) if whole else cell.kv_heads or ())
            effects.append(sum(float(tables[name][part][heads][:, slots].sum()) for part in seen_in(cell.part)))
        return np.array(effects)

    def _first_order(
        self, layer: int, names: Iterable[tuple[str, str]]
    ) -> dict[tuple[str, str], dict[str, Float[Tensor, "kv_heads slots"]]]:
        """By content and then by K and V, what swapping each head's slot does to the metric to first order."""
        tables: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
        for name in dict.fromkeys(names):
            for part, before, slopes in (("K", self.keys, self.key_slopes), ("V", self.values, self.value_slopes)):
                slope = slopes[layer]
                change = (self.reader.swapped[name][part][layer].float() - before[layer]).detach()
                zero = torch.zeros(change.shape[:2], device=change.device)
                tables[name][part] = zero if slope is None else (change * slope).sum(-1)
        return tables

    def _attend(self, attending: Attending) -> Tensor:
        """Attention to the base and the suffix at once, in one softmax, which autograd can follow."""
        source = self.reader.reads[attending.layer]
        self.clean[attending.layer] = attending
        keys = torch.cat([self.keys[source][None], attending.key.float()], 2)
        values = torch.cat([self.values[source][None], attending.value.float()], 2)
        whole = replace(attending, key=keys, value=values)
        output = whole.output(self.reader.seen[source]).to(attending.query.dtype)
        self.outputs[attending.layer] = output
        return output
