"""Each model reads texts and is asked under every way of hiding, and probes read what is left."""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model, load
from kvprobe.probing.controls import random_model
from kvprobe.progress import Bar
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.reading import (
    AT_ONCE,
    BOTH,
    ERASED,
    IN_VIEW,
    LATER,
    OWN_SLOTS,
    RESTART,
    STATE,
    TIMELESS,
    WHENS,
    Texts,
    When,
    answers,
    arms_of,
    bytes_of,
    caches,
    draw_texts,
    layers_of,
    parts_of,
    refuse_joined,
    trained,
    vectors,
)
from kvprobe.studies.ghost_state.turns import TURNS, read_toy
from kvprobe.studies.layer_readers import LINEAR, read_layers
from kvprobe.tasks.recall import BASE
from kvprobe.tidy import chosen
from kvprobe.training.memories import slow_to_forget

ANSWERS, PROBES, HEADS, REACH = "answers", "probes", "heads", "reach"
UNTRAINED = f"{LINEAR}, untrained model"
RULES = {"step": "delta rule", "gain": "Mamba-2", "conv": "convolutions"}
"""What states are called, by the first part of a layer that tells them."""
READ = (IN_VIEW, ERASED, BOTH, TIMELESS, RESTART)
"""The arms in which probes read."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `model`, `kind` and `memory`, `pairs` and `distance`: `answers`, see `reading.answers`, by
    `arm` and `when`; `probes`, what each `reader` reads of all digits in a `part`, in each `layer` and (−1) in the one
    that the inner fold chose; `heads`, the same of each head's state; `reach`, how far what must not know the hidden
    turn varies with it, see `_reach`; and `turns`, see `kvprobe.studies.ghost_state.turns`.
    """
    names = list(dict.fromkeys([config.model, *config.beside]))
    rows = Parts(model, config, run).table(measure, names, "model", doing="Reading models", unit="model")
    tables = {name: chosen(rows, {"table": name}) for name in (ANSWERS, PROBES, HEADS, REACH, TURNS)}
    return {name: table.dropna(axis=1, how="all") for name, table in tables.items() if len(table)}


def measure(model: Model, config: Config, name: str) -> pd.DataFrame:
    """All tables of the model of this name."""
    given = model if name == config.model else load(name, **config.loading)
    rows = read_toy(given, config) if name in (config.toys or ()) else read_model(given, config)
    # Models whose names differ in a seed alone are of one kind.
    return rows.assign(model=name, kind=re.sub(r"-\d+$", "", name), memory=memory_of(given))


def memory_of(model: Model) -> str:
    """What kinds of memory a model has."""
    geometry = model.geometry
    stored = {name for layer in geometry.recurrent for name in geometry.parts[layer]}
    states = next((rule for part, rule in RULES.items() if part in stored), "")
    return " and ".join(filter(None, (states, "attention" if geometry.attending else "")))


def read_model(model: Model, config: Config) -> pd.DataFrame:
    """All tables of one model, one below the other."""
    refuse_joined(model)
    blank = untrained(model, config.seed) if config.untrained and model.geometry.recurrent else None
    designs = {(config.pairs, distance) for distance in (config.distance, *config.distances)}
    designs |= {(pairs, config.distance) for pairs in config.capacities}
    tables: list[pd.DataFrame] = []
    for pairs, distance in Bar(sorted(designs), desc=f"Asking {model.name}", unit="design"):
        texts = draw_texts(model, config.texts, pairs, distance, config.seed)
        main = (pairs, distance) == (config.pairs, config.distance)
        rows = [*read_design(model, texts, arms_of(model) if main else [IN_VIEW, ERASED], main, config)]
        if blank is not None:
            read = pd.concat(read_design(blank, texts, [ERASED], False, config), ignore_index=True)
            rows.append(read[read["table"] == PROBES].assign(reader=UNTRAINED))
        tables.append(pd.concat(rows, ignore_index=True).assign(pairs=pairs, distance=distance))
    return pd.concat(tables, ignore_index=True)


def untrained(model: Model, seed: int) -> Model:
    """The same model with random weights; one of these texts starts as it started in training."""
    blank = random_model(model, seed)
    if trained(model):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            slow_to_forget(blank.lanes.plain)
    return blank


def read_design(model: Model, texts: Texts, arms: Sequence[str], main: bool, config: Config) -> Iterator[pd.DataFrame]:
    """The tables of texts of one shape.

    Args:
        main: whether the turn is also hidden at once, and all parts are read; else the states, and K and V of the turn.
    """
    held: dict[tuple[When, str, str], list[Tensor]] = {}
    size: dict[str, int] = {}
    for when in WHENS if main else (LATER,):
        for start in range(0, config.texts, config.batch):
            some = texts[slice(start, start + config.batch)]
            # Where nothing is hidden, or never was anything to hide, once is the same as later.
            made = caches(model, some, when, [arm for arm in arms if when == LATER or arm not in (IN_VIEW, RESTART)])
            for arm, cache in made.items():
                numbers = np.arange(start, start + len(some.own))
                yield answers(model, some, cache, arm).assign(table=ANSWERS, when=when, arm=arm, text=numbers)
                for part in parts_of(model, arm) if arm in READ else ():
                    if main or part in (STATE, *OWN_SLOTS):
                        held.setdefault((when, arm, part), []).append(vectors(model, cache, part))
                        size.setdefault(part, bytes_of(model, cache, part))
            if main and when == AT_ONCE and start == 0:
                yield _reach(model, some, made[TIMELESS])
    labels = torch.from_numpy(texts.digits.T.copy())
    rng = np.random.default_rng([config.seed, 1])
    for when, arm, part in [*held]:
        features, numbers = torch.cat(held.pop((when, arm, part)), 1), layers_of(model, part)
        rows = read_layers(features, labels, BASE, rng if config.mlp and main and when == LATER else None)
        of_layer = [-1 if layer < 0 else numbers[layer] for layer in rows["layer"].to_list()]
        yield rows.assign(layer=of_layer, table=PROBES, when=when, arm=arm, part=part, bytes=size[part])
        if main and (when, arm, part) == (LATER, ERASED, STATE):
            heads = {part.name: part.heads for part in model.geometry.layers[numbers[0]]}.get("value", 1)
            for layer, of_heads in zip(numbers, features.unflatten(2, (heads, -1)), strict=True):
                rows = read_layers(of_heads.transpose(0, 1).contiguous(), labels, BASE)
                rows = rows.loc[rows["layer"] >= 0]
                yield rows.assign(head=rows["layer"], layer=layer, table=HEADS)


def _reach(model: Model, texts: Texts, hidden: KVCache) -> pd.DataFrame:
    """By layer, how far what was hidden from everything at once, without decay, is from a restart, and how far it moves
    when the digits are those of the stand-ins; beside its size."""
    again = caches(model, texts, AT_ONCE, [RESTART])[RESTART]
    moved = caches(model, texts.swapped, AT_ONCE, [TIMELESS])[TIMELESS]
    rows = [
        {"varies": float(max((one - two).abs().max(), (one - three).abs().max()) / two.abs().max())}
        for part in parts_of(model, TIMELESS)
        for one, two, three in zip(*(vectors(model, cache, part) for cache in (hidden, again, moved)), strict=True)
    ]
    return pd.DataFrame(rows).assign(table=REACH)
