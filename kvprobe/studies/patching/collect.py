"""Two runs that differ in a fact, and what each part of the cache does when the one's K and V stand in the other.

The turn of the fact is cut in three: what stands before the value, the value's own tokens, and what stands after it.
Only the suffix, which is the question and the reply up to the value, sees what is swapped (`reads="reader"`), but for
the patches of the residual stream. One file per run is kept, so an interrupted run resumes.
"""

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.patching import LogitDiff, attribute, patch_sweep
from kvprobe.patching.grid import Over
from kvprobe.patching.pairs import table_of
from kvprobe.studies.patching import Config
from kvprobe.studies.patching.bands import Bands, bands_by_half
from kvprobe.tasks.facts import FactPair, facts, pair
from kvprobe.text.chat_template import Tokenizer

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


def pairs_of(config: Config, tokenizer: Tokenizer) -> list[FactPair]:
    """The runs of a config: of each pair the first conversation is patched, with K and V of the second (the donor).

    Bands that are found on the facts of one half are tested on those of the other.
    """
    runs: list[FactPair] = []
    chosen = facts(config.kinds, config.facts)
    halves = np.random.default_rng([config.seed, 1]).permutation(len(chosen)) % 2
    for place, (fact, half) in enumerate(zip(chosen, halves.tolist(), strict=True)):
        one = pair(fact, tokenizer).divided(VALUE)
        both = (one, one.turned)
        for way in both if config.ways == 2 else both[place % 2 :][:1]:
            runs.append(replace(way, number=len(runs), half=half))
    return runs


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """All maps (`samples`), and one run that the model can do, slot by slot (`example`), if there is one.

    Columns: `grid`, those of `kvprobe.patching.pairs.table_of` (`cluster` is the fact), `kind`, `half`, `able` (the
    model says each run's own value), and for attribution `score` and `linear`. A run that the model cannot do has only
    the cells of whole segments.
    """
    parts, cases = Parts(model, config, run), pairs_of(config, model.tokenizer)
    samples = parts.table(measure, cases, "maps", doing="Patching", unit="pair")
    known = samples[samples["able"]]
    todo = [case for case in cases if case.number in set(known["pair"])]
    if not todo:
        return {"samples": samples}
    bands = bands_by_half(known[known["grid"] == Grid.LAYERS], model.geometry.n_layers)
    if bands:
        patched = parts.table(measure_bands, todo, "bands", bands, doing="Patching bands", unit="pair")
        samples = pd.concat([samples, patched], ignore_index=True)
    example = parts.table(measure_slots, todo[:1], "example", doing="Patching slots", unit="pair")
    return {"samples": samples, "example": example}


def measure(model: Model, config: Config, case: FactPair) -> pd.DataFrame:
    """All maps of one run."""
    names, swept = case.prompts[0].names, Swept(model, case)
    whole = swept.by(Grid.WHOLE, {"segment": names})
    tables = [whole, swept.by(Grid.EVERYTHING, {}), swept.by(Grid.SAME, {}, itself=True, parts=("KV",))]
    can_do = able(whole)
    if can_do:
        over = {"layer": None, "segment": list(names[names.index(VALUE) :])}
        tables.append(swept.by(Grid.LAYERS, over))
        tables.append(swept.scored(Grid.HEADS, {**over, "head": None}, config.check, config.seed))
        if config.step:
            over = {"layer": range(0, model.geometry.n_layers, config.step), "segment": [VALUE]}
            tables.append(swept.by(Grid.RESIDUAL, over, parts=("resid_pre",), reads="total"))
    return swept.labelled(tables, can_do)


def able(table: pd.DataFrame) -> bool:
    """Whether the model says each run's own value."""
    return bool((table["base"] > 0).all() and (table["donor"] < 0).all())


def measure_bands(model: Model, config: Config, case: FactPair, bands: Bands) -> pd.DataFrame:
    """The other half's bands, all slots at once, and all other layers."""
    swept, tables = Swept(model, case), []
    for part, by_half in bands.items():
        inside = by_half[1 - case.half]
        outside = [layer for layer in range(model.geometry.n_layers) if layer not in inside]
        for where, layers in (("inside", inside), ("outside", outside)):
            if layers:
                tables.append(swept.by(Grid.BANDS, {"band": [layers]}, parts=(part,)).assign(where=where))
    return swept.labelled(tables, True)


def measure_slots(model: Model, config: Config, case: FactPair) -> pd.DataFrame:
    """Slot by slot, from two slots before the value on, which are the light cone's control."""
    prompt, swept = case.prompts[0], Swept(model, case)
    start = prompt.span(VALUE).start
    slots = range(max(0, start - 2), len(prompt))
    # The value and what follows it in its turn, whose tokens the prompt after them is read again for.
    stated = range(start, prompt.span(AFTER).stop)
    tables = [
        swept.scored(Grid.SLOTS, {"layer": None, "slot": slots}, 32, case.number),
        swept.by(Grid.TOKENS, {"slot": slots}),
        swept.by(Grid.TOTAL, {"slot": stated}, parts=("KV",), reads="total"),
    ]
    return swept.labelled(tables, True)


class Swept:
    """The two caches of a pair, and tables of what their patches do."""

    def __init__(self, model: Model, case: FactPair) -> None:
        self.model, self.case = model, case
        self.base, self.donor = map(model.prefill, case.prompts)
        # Positive where the model says the base's own value.
        self.metric = LogitDiff(*case.answers)

    def by(self, grid: Grid, over: Over, *, itself: bool = False, **settings: Any) -> pd.DataFrame:
        """A grid of exact patches; with `itself`, of the base's own K and V."""
        ends = (self.base, self.base if itself else self.donor)
        sweep = patch_sweep(self.model, *ends, self.case.suffix, self.metric, over, progress=False, **settings)
        return table_of(sweep, self.case.number, self.case.id).assign(grid=grid.value)

    def scored(self, grid: Grid, over: Over, check: int, seed: int) -> pd.DataFrame:
        """A grid of attributions, some of which are checked."""
        ends = (self.base, self.donor, self.case.suffix)
        scored = attribute(self.model, *ends, self.metric, over, check=check, seed=seed)
        return table_of(scored, self.case.number, self.case.id).assign(grid=grid.value)

    def labelled(self, tables: Iterable[pd.DataFrame], able: bool) -> pd.DataFrame:
        case = self.case
        return pd.concat(tables, ignore_index=True).assign(kind=case.kind, half=case.half, able=able)
