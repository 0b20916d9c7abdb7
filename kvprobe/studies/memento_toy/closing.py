"""Can the channel be closed without harm? What a memento holds of its block's digits is taken out of its K and V.

Exactly: the memento is written anew in view of another block that the text fits as well (a stand-in), so that it holds
nothing of its own block but what is in the text. Or linearly; see `kvprobe.studies.memento_toy.erasing`.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from kvprobe.inference.model import Model
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.digits import FOLDS, RESTART, digit_labels, read_linearly
from kvprobe.studies.memento_toy.erasing import Erasers, erasing, fit_mementos, mean_ranks
from kvprobe.studies.memento_toy.traces import restarted, retained, stood_in, token_rows
from kvprobe.tasks.mementos import Trace, draw_alike
from kvprobe.tidy import crossed

OPEN, STAND_IN = "open", "stand-in"
BEYOND, EVERYTHING, RANDOM = "beyond the sum", "everything", "random"
ERASED = (BEYOND, EVERYTHING, RANDOM)


def states_of(config: Config) -> list[str]:
    """What is done to mementos. Where they are copies, all that a text does not say is everything."""
    return [OPEN, STAND_IN, *(kind for kind in ERASED if (kind, config.content) != (BEYOND, "copy")), RESTART]


def measure_closing(model: Model, config: Config, state: str, traces: Sequence[Trace]) -> pd.DataFrame:
    """Three kinds of rows (`measure`), of traces on which no eraser was fitted. Of `answer`, one per trace and memento:
    whether it is `right`. Of `probe`, one per tested trace: the share of the block's digits that a linear probe reads
    in the last layer of the first memento that is written while the block is hidden (`right`), and that of digits which
    the text fits as well (`alike`). Of `rank`, one per layer: of how many dimensions an eraser is, on average."""
    fitted_on, keep = len(traces) // 3, config.keep
    rng = np.random.default_rng([config.seed, 4, states_of(config).index(state)])
    erasers: Erasers = {}
    if state in ERASED:
        kind = {"beyond_text": state != EVERYTHING, "random": state == RANDOM}
        erasers = fit_mementos(model, traces[:fitted_on], keep, rng, **kind)
    tested = traces[fitted_on:]
    others = [draw_alike(trace, rng) for trace in tested]
    right, vectors = [], []
    for start in range(0, len(tested), config.batch):
        some = slice(start, start + config.batch)
        rows = token_rows(model, tested[some])
        if state == RESTART:
            run = restarted(model, rows, keep, range(1, config.blocks + 1))
        elif state == STAND_IN:
            run = stood_in(model, rows, token_rows(model, others[some]), keep, config.blocks)
        else:
            run = retained(model, rows, keep, config.blocks, erasing(erasers))
        batch = []
        for written in run:
            batch.append(written.likeliest.all(1))
            if written.number == config.hidden_from:
                vectors.append(written.vectors[-1].transpose(0, 1).flatten(1).float().cpu())
        right.append(torch.stack(batch, 1).cpu())
    keys = {"trace": range(len(tested)), "memento": range(1, config.blocks + 1)}
    folds = torch.arange(len(tested)) % FOLDS
    digits = digit_labels(tested, config.block, np.random.default_rng([config.seed, 6]))
    read = pd.DataFrame(read_linearly(torch.cat(vectors), digits, folds))
    ranks = mean_ranks(erasers)
    tables = {
        "answer": crossed(keys, {"right": torch.cat(right).double().numpy()}),
        "probe": read.assign(trace=np.flatnonzero(folds.numpy() == 0)),
        "rank": pd.DataFrame({"layer": ranks.keys(), "rank": ranks.values()}),
    }
    measured = [table.assign(measure=name, state=state) for name, table in tables.items()]
    return pd.concat(measured, ignore_index=True)
