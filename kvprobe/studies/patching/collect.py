"""Two runs that differ in a fact, and what each part of the cache does when the one's K and V stand in the other.

The turn of the fact is cut in three: what stands before the value, the value's own tokens, and what stands after it.
Only the suffix, which is the question and the reply up to the value, sees what is swapped (`reads="reader"`), but for
the patches of the residual stream. One file per run is kept, so an interrupted run resumes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.patching import LogitDiff, attribute, patch_sweep
from kvprobe.patching.bands import Bands, bands_by_half
from kvprobe.patching.pairs import table_of
from kvprobe.studies.patching import Config
from kvprobe.tasks.facts import facts, pair
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens

VALUE, AFTER = "value", "fact after"
"""The value, and the turn of the fact after it with the reply; see `kvprobe.text.tokens.Tokens.divided`."""


class Grid(StrEnum):
    """What the cells of a table are; the last three are of the example."""

    WHOLE = "whole"  # all layers, by segment
    EVERYTHING = "everything"  # all layers and slots
    SAME = "same"  # everything, swapped for itself
    LAYERS = "layers"  # layer by segment
    HEADS = "heads"  # layer by segment by KV head (attribution)
    RESIDUAL = "residual"  # residual stream by layer
    BANDS = "bands"  # a band of layers, and the layers beside it
    SLOTS = "slots"  # layer by slot (attribution)
    TOKENS = "tokens"  # all layers by slot, seen by the reader
    TOTAL = "total"  # the same, seen by the prompt as well


@dataclass(frozen=True)
class Case:
    """One run that is patched, and the run whose K and V it is given.

    Attributes:
        half: bands found on the facts of one half are tested on those of the other.
    """

    number: int
    fact: str
    kind: str
    half: int
    base: Tokens
    donor: Tokens
    suffix: Tokens
    metric: LogitDiff


def cases_of(config: Config, tokenizer: Tokenizer) -> list[Case]:
    """The runs of a config. The metric is positive where the model says the base's own value."""
    cases: list[Case] = []
    chosen = facts(config.kinds, config.facts)
    halves = np.random.default_rng([config.seed, 1]).permutation(len(chosen)) % 2
    for place, (fact, half) in enumerate(zip(chosen, halves.tolist(), strict=True)):
        one = pair(fact, tokenizer)
        both = (one, one.turned)
        for way in both if config.ways == 2 else both[place % 2 :][:1]:
            base, donor = (prompt.divided(VALUE) for prompt in way.prompts)
            cases.append(Case(len(cases), fact.id, fact.kind, half, base, donor, way.suffix, LogitDiff(*way.answers)))
    return cases


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """All maps (`samples`), and one run that the model can do, slot by slot (`example`), if there is one.

    Columns: `grid`, those of `kvprobe.patching.pairs.table_of` (`cluster` is the fact), `kind`, `half`, `able` (the
    model says each run's own value), and for attribution `score` and `linear`. A run that the model cannot do has only
    the cells of whole segments.
    """

    def tables(name: str, doing: str, cases: Sequence[Case], measured: Callable[[Case], pd.DataFrame]) -> pd.DataFrame:
        return table_of_parts(run, cases, name, measured, doing=doing, unit="pair")

    cases = cases_of(config, model.tokenizer)
    samples = tables("maps", "Patching", cases, lambda case: measure(model, case, config))
    known = samples[samples["able"]]
    todo = [case for case in cases if case.number in set(known["pair"])]
    if not todo:
        return {"samples": samples}
    bands = bands_by_half(known[known["grid"] == Grid.LAYERS], model.geometry.n_layers)
    if bands:
        patched = tables("bands", "Patching bands", todo, lambda case: measure_bands(model, case, bands))
        samples = pd.concat([samples, patched], ignore_index=True)
    example = tables("example", "Patching slots", todo[:1], lambda case: measure_slots(model, case))
    return {"samples": samples, "example": example}


def measure(model: Model, case: Case, config: Config) -> pd.DataFrame:
    """All maps of one run."""
    base, donor = model.prefill(case.base), model.prefill(case.donor)
    reached = list(case.base.names[case.base.names.index(VALUE) :])
    tables = [
        _swept(model, case, Grid.WHOLE, base, donor, {"segment": case.base.names}),
        _swept(model, case, Grid.EVERYTHING, base, donor, {}),
        _swept(model, case, Grid.SAME, base, base, {}, parts=("KV",)),
    ]
    can_do = able(tables[0])
    if can_do:
        by_layer = {"layer": None, "segment": reached}
        tables.append(_swept(model, case, Grid.LAYERS, base, donor, by_layer))
        heads = {**by_layer, "head": None}
        tables.append(_scored(model, case, Grid.HEADS, base, donor, heads, config.check, config.seed))
        if config.step:
            over = {"layer": range(0, model.geometry.n_layers, config.step), "segment": [VALUE]}
            tables.append(_swept(model, case, Grid.RESIDUAL, base, donor, over, parts=("resid_pre",), reads="total"))
    return _labelled(tables, case, can_do)


def able(table: pd.DataFrame) -> bool:
    """Whether the model says each run's own value."""
    return bool((table["base"] > 0).all() and (table["donor"] < 0).all())


def measure_bands(model: Model, case: Case, bands: Bands) -> pd.DataFrame:
    """The other half's bands, all slots at once, and all other layers."""
    base, donor = model.prefill(case.base), model.prefill(case.donor)
    tables = []
    for part, by_half in bands.items():
        inside = by_half[1 - case.half]
        outside = [layer for layer in range(model.geometry.n_layers) if layer not in inside]
        for where, layers in (("inside", inside), ("outside", outside)):
            if layers:
                swept = _swept(model, case, Grid.BANDS, base, donor, {"band": [layers]}, parts=(part,))
                tables.append(swept.assign(where=where))
    return _labelled(tables, case, True)


def measure_slots(model: Model, case: Case) -> pd.DataFrame:
    """Slot by slot, from two slots before the value on."""
    base, donor = model.prefill(case.base), model.prefill(case.donor)
    start = case.base.span(VALUE).start
    # Two slots before the value are the light cone's control.
    slots = range(max(0, start - 2), len(case.base))
    # The value and what follows it in its turn, whose tokens the prompt after them is read again for.
    stated = range(start, case.base.span(AFTER).stop)
    tables = [
        _scored(model, case, Grid.SLOTS, base, donor, {"layer": None, "slot": slots}, 32, case.number),
        _swept(model, case, Grid.TOKENS, base, donor, {"slot": slots}),
        _swept(model, case, Grid.TOTAL, base, donor, {"slot": stated}, parts=("KV",), reads="total"),
    ]
    return _labelled(tables, case, True)


def _swept(
    model: Model, case: Case, grid: Grid, base: KVCache, donor: KVCache, over: Mapping[str, Any], **settings: Any
) -> pd.DataFrame:
    sweep = patch_sweep(model, base, donor, case.suffix, case.metric, over, progress=False, **settings)
    return table_of(sweep, case.number, case.fact).assign(grid=grid.value)


def _scored(
    model: Model, case: Case, grid: Grid, base: KVCache, donor: KVCache, over: Mapping[str, Any], check: int, seed: int
) -> pd.DataFrame:
    scored = attribute(model, base, donor, case.suffix, case.metric, over, check=check, seed=seed)
    return table_of(scored, case.number, case.fact).assign(grid=grid.value)


def _labelled(tables: Iterable[pd.DataFrame], case: Case, able: bool) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True).assign(kind=case.kind, half=case.half, able=able)
