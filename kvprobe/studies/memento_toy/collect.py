"""A model of the toy is read, its hidden block exchanged, and its hidden channel closed; other seeds and earlier
weights are read beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.work import kept
from kvprobe.files import read_table
from kvprobe.inference.model import Model, load
from kvprobe.probing.controls import random_model
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.closing import measure_closing, states_of
from kvprobe.studies.memento_toy.digits import DigitSite, read_sites, sites_of
from kvprobe.studies.memento_toy.exchange import exchange_blocks
from kvprobe.studies.memento_toy.probes import BOTH, probe
from kvprobe.tasks.mementos import Change, Trace, draw_changed, draw_trace

MAIN, UNTRAINED = "model", "untrained"
SEED, CHECKPOINT = "seed", "checkpoint"
TRACES, PROBED = "traces", ("samples", "answers", "reach")
"""Files of what probes need, and tables of what they read."""
Pair = tuple[Trace, Mapping[Change, Trace]]
"""A trace, and the same with other digits in one block."""


@dataclass(frozen=True)
class Read:
    """A model of a run: what it is called there, and what it is to the others."""

    name: str
    role: str

    @property
    def everywhere(self) -> bool:
        """Whether all is measured that is measured of `MAIN`, but for closing the channel."""
        return self.role in (MAIN, SEED)


def models_of(config: Config) -> list[Read]:
    """All models that are read, the main one first."""
    others = {SEED: config.seeds or (), CHECKPOINT: config.checkpoints or ()}
    read = [Read(name, role) for role, names in others.items() for name in names]
    return [Read(MAIN, MAIN), *read, *([Read(UNTRAINED, UNTRAINED)] if config.untrained else [])]


@kept
def loaded(model: Model, config: Config, read: Read) -> Model:
    """The model that is read, beside the main one."""
    if read.role == MAIN:
        return model
    if read.role == UNTRAINED:
        return random_model(model, config.seed)
    return load(read.name, **config.loading)


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `model` and `role`: `samples`, what probes read of each tested trace; `answers`, which of its
    mementos are right; `reach`, how far K and V can know what is hidden; and `changed`, what follows a hidden block
    that was exchanged. And `closing`, of the main model alone; see `kvprobe.studies.memento_toy.closing`.
    """
    parts, rng = Parts(model, config, run), np.random.default_rng([config.seed, 1])
    traces = [draw_trace(rng, config.content, config.blocks) for _ in range(config.traces)]
    rng = np.random.default_rng([config.seed, 2])
    pairs = [draw_changed(rng, config.block, config.content, config.blocks) for _ in range(config.changed)]
    rng = np.random.default_rng([config.seed, 3])
    others = [draw_trace(rng, config.content, config.blocks) for _ in range(config.closed)]
    batches = [(start, pairs[start : start + config.batch]) for start in range(0, len(pairs), config.batch)]
    tables: dict[str, list[pd.DataFrame]] = {**{name: [] for name in PROBED}, "changed": []}
    for number, read in enumerate(models_of(config)):
        name = f"{number:02d}"
        measured = probed(parts, read, name, traces)
        if read.everywhere:
            doing = f"Exchanging the hidden block, {name}"
            measured["changed"] = parts.table(changed, batches, f"{name}-changed", read, doing=doing, unit="batch")
        for table, rows in measured.items():
            tables[table].append(rows.assign(model=read.name, role=read.role))
    doing = "Closing the channel"
    closing = parts.table(measure_closing, states_of(config), "closing", others, doing=doing, unit="state")
    return {name: pd.concat(rows, ignore_index=True) for name, rows in tables.items()} | {"closing": closing}


def probed(parts: Parts[Config], read: Read, name: str, traces: Sequence[Trace]) -> dict[str, pd.DataFrame]:
    """What probes read of a model (see `probe`): tables that an earlier attempt wrote, or that are measured now, all at
    once."""
    config, run = parts.config, parts.run
    files = {table: f"{name}-{table}.parquet" for table in PROBED}
    if not all(run.part(file).is_file() for file in files.values()):
        layers, everywhere = loaded(parts.model, config, read).geometry.n_layers, read.everywhere
        sites = sites_of(layers, config.block, config.blocks, config.keep, everywhere=everywhere)
        batches = [traces[start : start + config.batch] for start in range(0, len(traces), config.batch)]
        doing = f"Reading traces, {name}"
        paths = parts.tensors(read_traces, batches, f"{name}-{TRACES}", read, sites, doing=doing, unit="batch")
        for table, rows in probe(paths, sites, traces, config, name, mlp=config.mlp and everywhere).items():
            run.write_part(files[table], rows.to_parquet)
    for path in run.part("").glob(f"*-{name}-{TRACES}.safetensors"):
        path.unlink()  # they are large, and other models follow
    return {table: read_table(run.part(file)) for table, file in files.items()}


def read_traces(
    model: Model, config: Config, some: Sequence[Trace], read: Read, sites: Sequence[DigitSite]
) -> dict[str, Tensor]:
    """What probes need of some traces."""
    return read_sites(loaded(model, config, read), some, sites, config.block, config.keep)


def changed(model: Model, config: Config, batch: tuple[int, Sequence[Pair]], read: Read) -> pd.DataFrame:
    """What follows the exchanged blocks of some pairs, the first of which has this number."""
    start, pairs = batch
    rows = exchange_blocks(loaded(model, config, read), pairs, config.block, config.keep)
    return rows.assign(trace=rows["trace"] + start, part=rows["part"].replace({"KV": BOTH}))
