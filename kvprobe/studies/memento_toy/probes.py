"""What probes read of a block's digits in mementos, retained and computed again.

A site is a memento, a layer, and K, V or both.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int

from kvprobe.experiments.parts import tensor_of_parts
from kvprobe.progress import Bar
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.digits import (
    FOLDS,
    RESTART,
    RETAINED,
    DigitSite,
    digit_labels,
    read_linearly,
)
from kvprobe.studies.memento_toy.mlp import mlp_predictions
from kvprobe.tasks.mementos import BASE, Trace
from kvprobe.tidy import crossed

BOTH, PARTS = "K and V", ("K", "V")
LINEAR, MLP = "linear", "with a hidden layer"


def probe(
    paths: Sequence[Path], sites: Sequence[DigitSite], traces: Sequence[Trace], config: Config, name: str, *, mlp: bool
) -> dict[str, pd.DataFrame]:
    """`samples`, the share of each tested trace's digits that is read (`right`), by site, part and probe, and that of
    digits which the text fits as well (`alike`); `answers`, whether its mementos are right, by arm; and `reach`, how
    far K and V differ between the arms by layer (`varies`).

    Args:
        paths: of what `read_sites` gave, some traces each.
        name: of the model, for the progress bar.
        mlp: whether probes with a hidden layer read as well.
    """
    digits = digit_labels(traces, config.block, np.random.default_rng([config.seed, 5]))
    folds = torch.arange(len(traces)) % FOLDS
    tested = np.flatnonzero(folds.numpy() == 0)
    tables = []
    for number, site in enumerate(Bar(sites, desc=f"Fitting probes, {name}", unit="site")):
        vectors = tensor_of_parts(paths, site.name)
        parts = {BOTH: vectors.flatten(1)}
        if site.distance == config.hidden_from - config.block:
            parts |= {part: vectors[:, place] for place, part in enumerate(PARTS)}
        read = [(part, LINEAR, read_linearly(features, digits, folds)) for part, features in parts.items()]
        if mlp:
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
    return {
        "samples": pd.concat(tables, ignore_index=True),
        "answers": pd.concat(answers, ignore_index=True),
        "reach": pd.DataFrame({"layer": range(len(reach)), "varies": reach.tolist()}),
    }


def answers_of(paths: Sequence[Path], arm: str, tested: Int[np.ndarray, "tested"], first: int) -> pd.DataFrame:
    """Whether each memento from `first` on is right, by tested trace."""
    right = tensor_of_parts(paths, f"right.{arm}").numpy()[tested]
    numbers = range(first, first + right.shape[1])
    return crossed({"trace": tested.tolist(), "memento": numbers}, {"right": right.astype(float)}).assign(arm=arm)
