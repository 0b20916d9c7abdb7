"""A model of the toy is read, its hidden block exchanged, and its hidden channel closed; other seeds and earlier
weights are read beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pandas as pd

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.files import read_table
from kvprobe.inference.model import Model, load
from kvprobe.probing.controls import random_model
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.closing import measure_closing, states_of
from kvprobe.studies.memento_toy.exchange import exchange_blocks
from kvprobe.studies.memento_toy.probes import BOTH, TRACES, probe
from kvprobe.tasks.mementos import draw_changed, draw_trace

MAIN, UNTRAINED = "model", "untrained"
SEED, CHECKPOINT = "seed", "checkpoint"


@dataclass(frozen=True)
class Read:
    """A model of a run: what it is called there, what it is to the others, and how it is loaded, if it is needed."""

    name: str
    role: str
    load: Callable[[], Model]

    @cached_property
    def model(self) -> Model:
        return self.load()

    @property
    def everywhere(self) -> bool:
        """Whether all is measured that is measured of `MAIN`, but for closing the channel."""
        return self.role in (MAIN, SEED)


def models_of(model: Model, config: Config) -> list[Read]:
    """All models that are read, the main one first."""
    others = {SEED: config.seeds or (), CHECKPOINT: config.checkpoints or ()}
    read = [Read(MAIN, MAIN, lambda: model)]
    for role, names in others.items():
        read += [Read(name, role, partial(load, name, device=config.device, dtype=config.dtype)) for name in names]
    if config.untrained:
        read.append(Read(UNTRAINED, UNTRAINED, lambda: random_model(model, config.seed)))
    return read


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `model` and `role`: `samples`, what probes read of each tested trace; `answers`, which of its
    mementos are right; `reach`, how far K and V can know what is hidden; and `changed`, what follows a hidden block
    that was exchanged. And `closing`, of the main model alone; see `kvprobe.studies.memento_toy.closing`.
    """
    rng = np.random.default_rng([config.seed, 1])
    traces = [draw_trace(rng, config.content, config.blocks) for _ in range(config.traces)]
    rng = np.random.default_rng([config.seed, 2])
    pairs = [draw_changed(rng, config.block, config.content, config.blocks) for _ in range(config.changed)]
    rng = np.random.default_rng([config.seed, 3])
    others = [draw_trace(rng, config.content, config.blocks) for _ in range(config.closed)]
    tables: dict[str, list[pd.DataFrame]] = {"samples": [], "answers": [], "reach": [], "changed": []}
    for number, read in enumerate(models_of(model, config)):
        name = f"{number:02d}"

        def probed(read: Read = read, name: str = name) -> dict[str, pd.DataFrame]:
            return probe(read.model, traces, config, run, name, everywhere=read.everywhere)

        def changed(start: int, read: Read = read) -> pd.DataFrame:
            rows = exchange_blocks(read.model, pairs[start : start + config.batch], config.block, config.keep)
            return rows.assign(trace=rows["trace"] + start, part=rows["part"].replace({"KV": BOTH}))

        measured = kept(run, name, ("samples", "answers", "reach"), probed)
        for path in run.part("").glob(f"*-{name}-{TRACES}.safetensors"):
            path.unlink()  # they are large, and other models follow
        if read.everywhere:
            starts = range(0, len(pairs), config.batch)
            doing = f"Exchanging the hidden block, {name}"
            measured["changed"] = table_of_parts(run, starts, f"{name}-changed", changed, doing=doing, unit="batch")
        for table, rows in measured.items():
            tables[table].append(rows.assign(model=read.name, role=read.role))

    def closed(state: str) -> pd.DataFrame:
        return measure_closing(model, others, config, state)

    closing = table_of_parts(run, states_of(config), "closing", closed, doing="Closing the channel", unit="state")
    return {name: pd.concat(rows, ignore_index=True) for name, rows in tables.items()} | {"closing": closing}


def kept(
    run: Run, name: str, tables: tuple[str, ...], measure: Callable[[], Mapping[str, pd.DataFrame]]
) -> dict[str, pd.DataFrame]:
    """Tables that an earlier attempt wrote, or that are measured now, all at once."""
    files = {table: f"{name}-{table}.parquet" for table in tables}
    if not all(run.part(file).is_file() for file in files.values()):
        for table, rows in measure().items():
            run.write_part(files[table], rows.to_parquet)
    return {table: read_table(run.part(file)) for table, file in files.items()}
