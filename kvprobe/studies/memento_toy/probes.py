"""What probes read of a block's digits in mementos, retained and computed again.

A site is a memento, a layer, and K, V or both. Reading takes place some traces at a time; what probes need of them is
kept until the probes of a model are done.
"""

from collections.abc import Sequence
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
from kvprobe.tasks.mementos import BASE, Trace, draw_alike
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


def sites_of(config: Config, layers: int, *, everywhere: bool) -> list[Site]:
    """The sites that are read.

    All layers of the memento that is written next to the block, and of the first one that is written while the block is
    hidden, which is also read after a restart; and the last layer of all others from the one before the block on.

    Args:
        everywhere: otherwise the first hidden memento alone.
    """
    hidden, last = config.hidden_from - config.block, layers - 1
    first = [Site(arm, hidden, layer) for arm, layer in product((RETAINED, RESTART), range(layers))]
    if not everywhere:
        return first
    later = range(hidden + 1, config.blocks - config.block + 1)
    return [
        *([Site(RETAINED, -1, last)] if config.block > 1 else []),
        *(Site(RETAINED, 0, layer) for layer in range(layers)),
        *(Site(RETAINED, distance, last) for distance in range(1, hidden)),
        *first,
        *(Site(arm, distance, last) for arm, distance in product((RETAINED, RESTART), later)),
    ]


def read_traces(model: Model, traces: Sequence[Trace], config: Config, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Of each trace, by site, K and V `[rows, 2, slots × width]`; and `right.ARM` `[rows, mementos]`, whether each
    memento is right. Of all, `reach` `[1, layers]`: how far K and V of the first memento that is written while the
    block is hidden differ between the arms, relative to their size."""
    rows, tensors = rows_of(model, traces), dict[str, Tensor]()
    runs = {
        RETAINED: retained(model, rows, config.keep, config.blocks),
        RESTART: restarted(model, rows, config.keep, range(config.hidden_from, config.blocks + 1)),
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
        [tensors[Site(arm, config.hidden_from - config.block, layer).name] for arm in (RETAINED, RESTART)]
        for layer in range(model.geometry.n_layers)
    ]
    tensors["reach"] = torch.stack([(one - other).abs().max() / one.abs().max() for one, other in pairs])[None]
    return tensors


def probe(
    model: Model, traces: Sequence[Trace], config: Config, run: Run, name: str, *, everywhere: bool
) -> dict[str, pd.DataFrame]:
    """`samples`, the share of each tested trace's digits that is read (`right`), by site, part and probe, and that of
    digits which the text fits as well (`alike`); `answers`, whether its mementos are right, by arm; and `reach`, how
    far K and V differ between the arms by layer (`varies`).

    Args:
        name: of the model, in the names of files.
        everywhere: see `sites_of`; otherwise by linear probes alone.
    """
    sites = sites_of(config, model.geometry.n_layers, everywhere=everywhere)
    paths = tensor_parts(
        run,
        [traces[start : start + config.batch] for start in range(0, len(traces), config.batch)],
        f"{name}-{TRACES}",
        lambda some: read_traces(model, some, config, sites),
        doing=f"Reading traces, {name}",
        unit="batch",
    )
    digits = labels_of(traces, config, np.random.default_rng([config.seed, 5]))
    folds = torch.arange(len(traces)) % FOLDS
    tested = np.flatnonzero(folds.numpy() == 0)
    tables = []
    for number, site in enumerate(Bar(sites, desc=f"Fitting probes, {name}", unit="site")):
        vectors = tensor_of_parts(paths, site.name)
        parts = {BOTH: vectors.flatten(1)}
        if site.distance == config.hidden_from - config.block:
            parts |= {part: vectors[:, place] for place, part in enumerate(PARTS)}
        read = [(part, LINEAR, read_linearly(features, digits, folds)) for part, features in parts.items()]
        if config.mlp and everywhere:
            rng = np.random.default_rng([config.seed, 3, number])
            predicted = mlp_predictions(parts[BOTH], digits[0], folds, BASE, rng)
            right = predicted.eq(digits[0][:, folds == 0]).double().mean(0).numpy()
            read.append((BOTH, MLP, {"right": right, "alike": np.full(len(right), np.nan)}))
        for part, kind, shares in read:
            keys = {"trace": tested, **site._asdict(), "part": part, "probe": kind}
            tables.append(pd.DataFrame({**keys, **shares}))
    answers = [
        answers_of(paths, arm, tested, 1 if arm == RETAINED else config.hidden_from) for arm in (RETAINED, RESTART)
    ]
    reach = tensor_of_parts(paths, "reach").max(0).values
    layers = range(len(reach))
    return {
        "samples": pd.concat(tables, ignore_index=True),
        "answers": pd.concat(answers, ignore_index=True),
        "reach": pd.DataFrame({"layer": layers, "near": [layer < 2 for layer in layers], "varies": reach.tolist()}),
    }


def labels_of(traces: Sequence[Trace], config: Config, rng: np.random.Generator) -> list[Int[Tensor, "digits rows"]]:
    """The digits of the block, and digits that the text fits as well: what is read of these is in the text."""
    return [digits_of(some, config.block) for some in (traces, [draw_alike(trace, rng) for trace in traces])]


def read_linearly(
    features: Float[Tensor, "rows dim"], digits: list[Int[Tensor, "digits rows"]], folds: Int[Tensor, "rows"]
) -> dict[str, Float[np.ndarray, "tested"]]:
    """The share of each tested trace's digits that linear probes read (`right`), and of those that fit as well
    (`alike`)."""
    fitted = next(fitted_by_fold(features[None], digits, folds, BASE, only=[0]))
    hits = [task.predicted[0].eq(labels[:, folds == 0]) for task, labels in zip(fitted, digits, strict=True)]
    return {name: hit.double().mean(0).numpy() for name, hit in zip(("right", "alike"), hits, strict=True)}


def answers_of(paths: Sequence[Path], arm: str, tested: Int[np.ndarray, "tested"], first: int) -> pd.DataFrame:
    """Whether each memento from `first` on is right, by tested trace."""
    right = tensor_of_parts(paths, f"right.{arm}").numpy()[tested]
    numbers = range(first, first + right.shape[1])
    return crossed({"trace": tested.tolist(), "memento": numbers}, {"right": right.astype(float)}).assign(arm=arm)
