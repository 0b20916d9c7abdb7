"""What K and V of mementos hold of a block's digits, retained and computed again.

What is read may be in the text. So each digit stands beside one that the text fits as well: of that, a probe of the
same slots reads what the text says and nothing else.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.inference.model import Model
from kvprobe.probing.ridge import fitted_by_fold
from kvprobe.studies.memento_toy.traces import restarted, retained, token_rows
from kvprobe.tasks.mementos import BASE, Trace, draw_alike

RETAINED, RESTART = "retained", "restart"
FOLDS = 4
"""Fold 0 is tested, fold 1 chooses penalties and epochs."""


class DigitSite(NamedTuple):
    """Where digits are read: in the slots of a memento so many blocks after their own, in one layer, of one arm."""

    arm: str
    distance: int
    layer: int

    @property
    def name(self) -> str:
        return f"{self.arm}.{self.distance}.{self.layer}"


def sites_of(layers: int, block: int, blocks: int, keep: int = 0, *, everywhere: bool = True) -> list[DigitSite]:
    """Where the digits of a block are read.

    All layers of the memento that is written next to the block, and of the first one that is written while the block is
    hidden, which is also read after a restart; and the last layer of all others from the one before the block on.

    Args:
        layers: of the model.
        blocks: of a trace.
        keep: blocks before the present one that stay in view.
        everywhere: otherwise the first hidden memento alone.
    """
    hidden, last = keep + 1, layers - 1
    first = [DigitSite(arm, hidden, layer) for arm, layer in product((RETAINED, RESTART), range(layers))]
    if not everywhere:
        return first
    later = range(hidden + 1, blocks - block + 1)
    return [
        *([DigitSite(RETAINED, -1, last)] if block > 1 else []),
        *(DigitSite(RETAINED, 0, layer) for layer in range(layers)),
        *(DigitSite(RETAINED, distance, last) for distance in range(1, hidden)),
        *first,
        *(DigitSite(arm, distance, last) for arm, distance in product((RETAINED, RESTART), later)),
    ]


def read_sites(
    model: Model, traces: Sequence[Trace], sites: Sequence[DigitSite], block: int, keep: int = 0
) -> dict[str, Tensor]:
    """Of each trace, by site, K and V `[rows, 2, slots × width]`; and `right.ARM` `[rows, mementos]`, whether each
    memento is right, of the arm `restart` from the first one on that is written while the block is hidden. Of all,
    `reach` `[1, layers]`: how far K and V of that memento differ between the arms, relative to their size.

    Args:
        sites: both arms of all layers of that memento among them.
        block: whose digits are read.
        keep: blocks before the present one that stay in view.
    """
    rows, tensors, first, last = token_rows(model, traces), dict[str, Tensor](), block + keep + 1, len(traces[0].blocks)
    runs = {
        RETAINED: retained(model, rows, keep, last),
        RESTART: restarted(model, rows, keep, range(first, last + 1)),
    }
    for arm, run in runs.items():
        right = []
        for written in run:
            right.append(written.likeliest.all(1))
            here = [site for site in sites if site.arm == arm and site.distance == written.number - block]
            vectors = written.vectors.flatten(3) if here else torch.empty(0)
            tensors |= {site.name: vectors[site.layer].transpose(0, 1).float().cpu().contiguous() for site in here}
        tensors[f"right.{arm}"] = torch.stack(right, 1).cpu()
    pairs = [
        [tensors[DigitSite(arm, first - block, layer).name] for arm in (RETAINED, RESTART)]
        for layer in range(model.geometry.n_layers)
    ]
    tensors["reach"] = torch.stack([(one - other).abs().max() / one.abs().max() for one, other in pairs])[None]
    return tensors


def digit_labels(traces: Sequence[Trace], block: int, rng: np.random.Generator) -> list[Int[Tensor, "digits rows"]]:
    """The digits of a block, and random digits that the text fits as well."""
    alike = [draw_alike(trace, rng) for trace in traces]
    return [torch.tensor([trace.blocks[block - 1] for trace in some]).T.contiguous() for some in (traces, alike)]


def read_linearly(
    features: Float[Tensor, "rows dim"], digits: Sequence[Int[Tensor, "digits rows"]], folds: Int[Tensor, "rows"]
) -> dict[str, Float[np.ndarray, "tested"]]:
    """The share of each trace's digits in fold 0 that linear probes read (`right`), and of those that fit as well
    (`alike`).

    Args:
        digits: see `digit_labels`.
    """
    fitted = next(fitted_by_fold(features[None], digits, folds, BASE, only=[0]))
    hits = [task.predicted[0].eq(labels[:, folds == 0]) for task, labels in zip(fitted, digits, strict=True)]
    return {name: hit.double().mean(0).numpy() for name, hit in zip(("right", "alike"), hits, strict=True)}
