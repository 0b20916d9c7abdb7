"""A model of the toy is read, its hidden block exchanged, and its hidden channel closed; other seeds and earlier
weights are read beside it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.files import read_table
from kvprobe.inference.model import Model, load
from kvprobe.probing.controls import random_model
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.changing import draw_pair, measure_changed
from kvprobe.studies.memento_toy.closing import measure_closing
from kvprobe.studies.memento_toy.probes import TRACES, probe
from kvprobe.tasks.mementos import draw_trace

MAIN, UNTRAINED = "model", "untrained"
SEED, CHECKPOINT = "seed", "checkpoint"


class Read(NamedTuple):
    """A model of a run: what it is called there, and what it is to the others."""

    name: str
    role: str
    model: Callable[[], Model]

    @property
    def whole(self) -> bool:
        """Whether all is measured that is measured of `MAIN`, but for closing the channel."""
        return self.role in (MAIN, SEED)


def models_of(model: Model, config: Config) -> list[Read]:
    """All models that are read, the main one first."""

    def other(source: str) -> Callable[[], Model]:
        return lambda: load(source, device=config.device, dtype=config.dtype)

    read = [Read(MAIN, MAIN, lambda: model)]
    read += [Read(name, SEED, other(name)) for name in config.seeds or ()]
    read += [Read(name, CHECKPOINT, other(name)) for name in config.checkpoints or ()]
    if config.untrained:
        read.append(Read(UNTRAINED, UNTRAINED, lambda: random_model(model, config.seed)))
    return read


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `model` and `role`: `samples`, what probes read of each tested trace; `answers`, which of its
    mementos are right; `reach`, how far K and V can know what is hidden; and `changed`, what follows a hidden block
    that was exchanged. Of the main model alone: `closed`, which mementos are right with the channel closed; `left`,
    what probes read then; and `ranks`, those of erasers.
    """
    rng = np.random.default_rng([config.seed, 1])
    traces = [draw_trace(rng, config.content, config.blocks) for _ in range(config.traces)]
    rng = np.random.default_rng([config.seed, 2])
    pairs = [draw_pair(config, rng) for _ in range(config.changed)]
    starts = range(0, len(pairs), config.batch)
    tables: dict[str, list[pd.DataFrame]] = {"samples": [], "answers": [], "reach": [], "changed": []}
    for number, read in enumerate(models_of(model, config)):
        one, name = read.model(), f"{number:02d}"
        probed = partial(probe, one, traces, config, run, name, whole=read.whole)
        measured = kept(run, name, ("samples", "answers", "reach"), probed)
        for path in run.part("").glob(f"*-{name}-{TRACES}.safetensors"):
            path.unlink()  # they are large, and other models follow
        if read.whole:

            def changed(start: int, one: Model = one) -> pd.DataFrame:
                rows = measure_changed(one, pairs[start : start + config.batch], config)
                return rows.assign(trace=rows["trace"] + start)

            measured["changed"] = table_of_parts(
                run, starts, f"{name}-changed", changed, doing="Exchanging the hidden block", unit="batch"
            )
        for table, rows in measured.items():
            tables[table].append(rows.assign(model=read.name, role=read.role))
    rng = np.random.default_rng([config.seed, 4])
    others = [draw_trace(rng, config.content, config.blocks) for _ in range(config.closed)]
    closing = kept(run, "closing", ("closed", "left", "ranks"), lambda: measure_closing(model, others, config, rng))
    return {name: pd.concat(rows, ignore_index=True) for name, rows in tables.items()} | closing


def kept(
    run: Run, name: str, tables: tuple[str, ...], measure: Callable[[], Mapping[str, pd.DataFrame]]
) -> dict[str, pd.DataFrame]:
    """Tables that an earlier attempt wrote, or that are measured now, all at once."""
    files = {table: f"{name}-{table}.parquet" for table in tables}
    if not all(run.part(file).is_file() for file in files.values()):
        for table, rows in measure().items():
            run.write_part(files[table], rows.to_parquet)
    return {table: read_table(run.part(file)) for table, file in files.items()}
