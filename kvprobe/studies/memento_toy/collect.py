"""A model of the toy is read, its hidden block exchanged, and its hidden channel closed; so are those of other seeds and
earlier weights, as far as they are compared."""

from collections.abc import Callable, Mapping
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
from kvprobe.studies.memento_toy.probes import probe
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
    mementos are right; `reach`, how far K and V can know what is hidden; and `changed`, what follows a hidden block that
    was exchanged. Of the main model alone: `closed`, which mementos are right with the channel closed; `left`, what
    probes read then; and `ranks`, those of erasers.
    """
    rng = np.random.default_rng([config.seed, 1])
    traces = [draw_trace(rng, config.content, config.blocks) for _ in range(config.traces)]
    rng = np.random.default_rng([config.seed, 2])
    pairs = [draw_pair(config, rng) for _ in range(config.changed)]
    tables: dict[str, list[pd.DataFrame]] = {"samples": [], "answers": [], "reach": [], "changed": []}
    for number, read in enumerate(models_of(model, config)):
        one, name = read.model(), f"{number:02d}"

        def probed(name: str = name, one: Model = one, whole: bool = read.whole) -> Mapping[str, pd.DataFrame]:
            return probe(one, traces, config, run, name, whole=whole)

        measured = kept(run, name, ("samples", "answers", "reach"), probed)
        if read.whole:
            batches = [range(start, min(start + config.batch, len(pairs))) for start in range(0, len(pairs), config.batch)]
            measured["changed"] = table_of_parts(
                run,
                batches,
                f"{name}-changed",
                lambda rows, one=one: measure_changed(one, [pairs[row] for row in rows], config).assign(
                    trace=lambda table, rows=rows: table["trace"] + rows.start
                ),
                doing="Exchanging the hidden block",
                unit="batch",
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
    measured: Mapping[str, pd.DataFrame] = {}
    for table in tables:
        if not measured and not run.part(f"{name}-{table}.parquet").is_file():
            measured = measure()
        run.write_part(f"{name}-{table}.parquet", lambda path, table=table: measured[table].to_parquet(path))
    return {table: read_table(run.part(f"{name}-{table}.parquet")) for table in tables}
