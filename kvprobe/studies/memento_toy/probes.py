"""What probes read of a block's digits in mementos, retained and computed again.

A site is a memento, a layer, and K, V or both. Reading takes place some traces at a time; what probes need of them is
kept until the probes of a model are done.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.experiments.parts import tensor_of_parts, tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.mlp import mlp_predictions
from kvprobe.probing.ridge import fitted_by_fold
from kvprobe.progress import Bar
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.reading import digits_of, restarted, retained, rows_of
from kvprobe.tasks.mementos import BASE, Trace
from kvprobe.tidy import crossed

RETAINED, RESTART = "retained", "restart"
BOTH, PARTS = "K and V", ("K", "V")
LINEAR, MLP = "linear", "with a hidden layer"
TRACES = "traces"
"""Of the files of what probes need."""
FOLDS = 4
"""Fold 0 is tested, fold 1 chooses penalties and epochs."""


class Site(NamedTuple):
    """Where digits are read: in the slots of a memento so many blocks after their own, in one layer."""

    arm: str
    distance: int
    layer: int

    @property
    def name(self) -> str:
        return f"{self.arm}.{self.distance}.{self.layer}"


def sites_of(config: Config, layers: int, *, whole: bool) -> list[Site]:
    """The sites that are read.

    Retained and restarted: all layers of the first memento that is written while the block is hidden, and the last
    layer of all later ones. Retained alone: all layers of those that see the block, and the last layer of the memento
    before it.

    Args:
        whole: otherwise the first hidden memento alone.
    """
    first, last = config.first - config.block, layers - 1
    every = [Site(arm, first, layer) for arm, layer in product((RETAINED, RESTART), range(layers))]
    if not whole:
        return every
    seen = [Site(RETAINED, distance, layer) for distance, layer in product(range(first), range(layers))]
    later = range(first + 1, config.blocks - config.block + 1)
    before = [Site(RETAINED, -1, last)] if config.block > 1 else []
    return [
        *before,
        *seen,
        *every,
        *(Site(arm, distance, last) for arm, distance in product((RETAINED, RESTART), later)),
    ]


def read_traces(model: Model, traces: Sequence[Trace], config: Config, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Of each trace, `digits` `[rows, digits]`; by site, K and V `[rows, 2, slots × width]`; and `right.ARM`
    `[rows, mementos]`, whether each memento is right that was written on the way. Of all, `reach` `[1, layers]`: how
    far K and V of the first memento after the block was hidden differ between the arms, relative to their size."""
    rows, tensors = rows_of(model, traces), {"digits": digits_of(traces, config.block).T.contiguous()}
    last = config.block + max(site.distance for site in sites)
    runs = {
        RETAINED: retained(model, rows, config.keep, last),
        RESTART: restarted(model, rows, config.keep, range(config.first, last + 1)),
    }
    for arm, run in runs.items():
        right = []
        for written in run:
            right.append(written.likeliest.all(1))
            here = [site for site in sites if site.arm == arm and site.distance == written.number - config.block]
            vectors = written.vectors.flatten(3) if here else torch.empty(0)
            tensors |= {site.name: vectors[site.layer].transpose(0, 1).float().cpu().contiguous() for site in here}
        tensors[f"right.{arm}"] = torch.stack(right, 1).cpu()
    pairs = [
        [tensors[Site(arm, config.first - config.block, layer).name] for arm in (RETAINED, RESTART)]
        for layer in range(model.geometry.n_layers)
    ]
    tensors["reach"] = torch.stack([(one - other).abs().max() / one.abs().max() for one, other in pairs])[None]
    return tensors


def probe(
    model: Model, traces: Sequence[Trace], config: Config, run: Run, name: str, *, whole: bool
) -> dict[str, pd.DataFrame]:
    """`samples`, the share of each tested trace's digits that is read (`right`), by site, part and probe; `answers`,
    whether its mementos are right, by arm; and `reach`, how far K and V differ between the arms by layer (`varies`).

    Args:
        name: of the model, in the names of files.
        whole: see `sites_of`.
    """
    sites = sites_of(config, model.geometry.n_layers, whole=whole)
    paths = tensor_parts(
        run,
        [traces[start : start + config.batch] for start in range(0, len(traces), config.batch)],
        f"{name}-{TRACES}",
        lambda some: read_traces(model, some, config, sites),
        doing=f"Reading traces, {name}",
        unit="batch",
    )
    digits = tensor_of_parts(paths, "digits").T.contiguous()
    folds = torch.arange(len(traces)) % FOLDS
    tested = np.flatnonzero(folds.numpy() == 0)
    tables = []
    for number, site in enumerate(Bar(sites, desc=f"Fitting probes, {name}", unit="site")):
        rng = np.random.default_rng([config.seed, 3, number])
        hits = read_site(tensor_of_parts(paths, site.name), digits, folds, config, rng)
        tables += [
            pd.DataFrame({"trace": tested, **site._asdict(), "part": part, "probe": kind, "right": right})
            for (part, kind), right in hits.items()
        ]
    answers = [answers_of(paths, arm, tested, 1 if arm == RETAINED else config.first) for arm in (RETAINED, RESTART)]
    reach = tensor_of_parts(paths, "reach").max(0).values
    layers = range(len(reach))
    return {
        "samples": pd.concat(tables, ignore_index=True),
        "answers": pd.concat(answers, ignore_index=True),
        "reach": pd.DataFrame({"layer": layers, "near": [layer < 2 for layer in layers], "varies": reach.tolist()}),
    }


def read_site(
    vectors: Float[Tensor, "rows 2 dim"],
    digits: Int[Tensor, "digits rows"],
    folds: Int[Tensor, "rows"],
    config: Config,
    rng: np.random.Generator,
) -> Mapping[tuple[str, str], Float[np.ndarray, "tested"]]:
    """The share of each tested trace's digits that is read, by part and probe."""
    truth = digits[:, folds == 0]
    parts = {BOTH: vectors.flatten(1)} | {part: vectors[:, place] for place, part in enumerate(PARTS)}
    hits = {}
    for part, features in parts.items():
        (fitted,) = next(fitted_by_fold(features[None], [digits], folds, BASE, only=[0]))
        hits[part, LINEAR] = fitted.predicted[0].eq(truth)
    if config.mlp:
        hits[BOTH, MLP] = mlp_predictions(parts[BOTH], digits, folds, BASE, rng).eq(truth)
    return {key: right.double().mean(0).numpy() for key, right in hits.items()}


def answers_of(paths: Sequence[Path], arm: str, tested: Int[np.ndarray, "tested"], first: int) -> pd.DataFrame:
    """Whether each memento from `first` on is right, by tested trace."""
    right = tensor_of_parts(paths, f"right.{arm}").numpy()[tested]
    numbers = range(first, first + right.shape[1])
    return crossed({"trace": tested.tolist(), "memento": numbers}, {"right": right.astype(float)}).assign(arm=arm)
