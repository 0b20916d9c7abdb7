"""Each model reads texts and is asked under every way of hiding, and probes read what is left."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
import torch

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model, load
from kvprobe.progress import Bar
from kvprobe.studies.ghost_state import Config
from kvprobe.studies.ghost_state.reading import (
    BOTH,
    ERASED,
    IN_VIEW,
    LATER,
    RESTART,
    STATE,
    TIMELESS,
    WHENS,
    Texts,
    answers,
    arms_of,
    bytes_of,
    caches,
    draw_texts,
    layers_of,
    parts_of,
    refuse_joined,
    state_of,
    vectors,
)
from kvprobe.studies.ghost_state.turns import TURNS, read_toy
from kvprobe.studies.layer_readers import read_layers
from kvprobe.tasks.recall import BASE
from kvprobe.tidy import chosen

TABLES = ANSWERS, PROBES, HEADS, REACH = "answers", "probes", "heads", "reach"
READ = (IN_VIEW, ERASED, BOTH, TIMELESS, RESTART)
"""Those in which probes read."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `model` and `memory`, `pairs` and `distance`: `answers`, see `reading.answers`, by `arm` and
    `when`; `probes`, what each `reader` reads of all digits in a `part`, in each `layer` and (−1) in the one that the
    inner fold chose; `heads`, the same of each head's state; `reach`, how far a restart and a state without the hidden
    turn vary with its digits; and `turns`, see `kvprobe.studies.ghost_state.turns`.
    """
    known = {config.model: lambda: model} | {
        name: partial(load, name, device=config.device, dtype=config.dtype)
        for name in (*(config.others or ()), *(config.toys or ()))
    }
    toys = set(config.toys or ())

    def read(name: str) -> pd.DataFrame:
        given = known[name]()
        rows = read_toy(given, config) if name in toys else read_model(given, config)
        return rows.assign(model=name, memory=memory_of(given))

    rows = table_of_parts(run, list(known), "model", read, doing="Reading models", unit="model")
    names = (*TABLES, *([TURNS] if toys else []))
    return {name: chosen(rows, {"table": name}).dropna(axis=1, how="all") for name in names}


def memory_of(model: Model) -> str:
    """What kinds of memory a model has."""
    geometry = model.geometry
    stored = {name for layer in geometry.recurrent for name in geometry.parts[layer]}
    rules = {"step": "delta rule", "gain": "Mamba-2", "conv": "convolutions"}
    states = next((rule for part, rule in rules.items() if part in stored), "")
    return " and ".join(filter(None, (states, "attention" if geometry.attending else "")))


def read_model(model: Model, config: Config) -> pd.DataFrame:
    """All tables of one model, one below the other."""
    refuse_joined(model)
    designs = {(config.pairs, distance) for distance in (config.distance, *config.distances)}
    designs |= {(pairs, config.distance) for pairs in config.capacities}
    tables: list[pd.DataFrame] = []
    for pairs, distance in Bar(sorted(designs), desc=f"Asking {model.name}", unit="design"):
        rng = np.random.default_rng([config.seed, pairs, distance])
        texts = draw_texts(model, config.texts, pairs, distance, rng)
        main = (pairs, distance) == (config.pairs, config.distance)
        rows = pd.concat(read_design(model, texts, main, config, rng), ignore_index=True)
        tables.append(rows.assign(pairs=pairs, distance=distance))
    return pd.concat(tables, ignore_index=True)


def read_design(
    model: Model, texts: Texts, main: bool, config: Config, rng: np.random.Generator
) -> Iterator[pd.DataFrame]:
    """The tables of texts of one shape.

    Args:
        main: whether all arms are measured and all parts read; else how far the state reaches, after an engine's erase.
    """
    arms = arms_of(model) if main else [ERASED]
    held: dict[tuple[str, str, str], list[torch.Tensor]] = {}
    size: dict[str, int] = {}
    varies: list[float] = []
    for when in WHENS if main else (LATER,):
        for start in range(0, config.texts, config.batch):
            some = texts[slice(start, start + config.batch)]
            by_arm = caches(model, some, when, arms)
            for arm, cache in by_arm.items():
                numbers = np.arange(start, start + len(some.own))
                yield answers(model, some, cache, arm).assign(table=ANSWERS, when=when, arm=arm, text=numbers)
                read = parts_of(model, arm) if arm in READ else []
                for part in read if main else set(read) & {STATE}:
                    held.setdefault((when, arm, part), []).append(vectors(model, cache, part))
                    size.setdefault(part, bytes_of(model, cache, part))
        if main:
            varies.append(_varies(model, texts[: config.batch], when))
    if main:
        yield pd.DataFrame({"table": [REACH] * len(varies), "when": WHENS, "varies": varies})
    labels = torch.from_numpy(texts.digits.T.copy())
    for (when, arm, part), parts in held.items():
        features = torch.cat(parts, 1)
        rows = read_layers(features, labels, BASE, rng if config.mlp and main and when == LATER else None)
        rows["layer"] = rows["layer"].map({-1: -1, **dict(enumerate(layers_of(model, part)))})
        yield rows.assign(table=PROBES, when=when, arm=arm, part=part, bytes=size[part])
        if main and (when, arm, part) == (LATER, ERASED, STATE):
            heads = state_of(caches(model, texts[:1], when, [arm])[arm], model.geometry.recurrent[0]).shape[1]
            for number, of_heads in enumerate(features.unflatten(2, (heads, -1)).unbind(0)):
                of_head = read_layers(of_heads.transpose(0, 1).contiguous(), labels, BASE)
                of_head = of_head[of_head["layer"] >= 0].rename(columns={"layer": "head"})
                yield of_head.assign(table=HEADS, layer=model.geometry.recurrent[number])


def _varies(model: Model, texts: Texts, when: str) -> float:
    """How far what must not know the digits moves, beside its size, when these are those of the stand-ins: the whole
    cache where the turn was hidden from everything at once, and after a restart."""
    swapped = Texts(texts.other, texts.own, texts.without, texts.others, texts.digits, texts.asked)
    arms = [TIMELESS, RESTART] if when == WHENS[0] else [RESTART]
    one, other = (caches(model, some, when, arms) for some in (texts, swapped))
    pairs = [
        (vectors(model, one[arm], part), vectors(model, other[arm], part))
        for arm in arms
        for part in parts_of(model, arm)
    ]
    return max(float((left - right).abs().max() / left.abs().max()) for left, right in pairs)
