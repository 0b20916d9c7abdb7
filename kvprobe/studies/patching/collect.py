"""Two runs that differ in a fact, and what each part of the cache does when the one's K and V stand in the other.

The turn of the fact is cut in three: what stands before the value, the value's own tokens, and what stands after it.
Only the suffix, which is the question and the reply up to the value, sees what is swapped (`reads="reader"`), but for
the patches of the residual stream. One file per run is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.patching import LogitDiff, attribute, patch_sweep
from kvprobe.patching.pairs import table_of
from kvprobe.studies.patching.config import Config
from kvprobe.tasks.facts import Pair, facts, pair
from kvprobe.text.chat_template import Tokenizer
from kvprobe.text.tokens import Tokens

BEFORE, VALUE, AFTER = "fact before", "value", "fact after"
"""The turn of the fact up to the value, the value, and the turn after it with the reply."""
WHOLE, EVERYTHING, LAYERS, HEADS, RESIDUAL, SAME, BANDS = (
    "whole", "everything", "layers", "heads", "residual", "same", "bands",
)  # fmt: skip
"""Grids: all layers by segment; all layers and slots; layer by segment; layer by segment by KV head (attribution);
residual stream by layer; everything, swapped for itself; a band of layers and the layers beside it."""
SLOTS, TOKENS, TOTAL = "slots", "tokens", "total"
"""Grids of the example: layer by slot (attribution); all layers by slot, seen by the reader; and by the prompt as
well."""


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


Bands = Mapping[str, Mapping[int, range]]
"""By part and half: the layers found on that half."""


def cases_of(config: Config, tokenizer: Tokenizer) -> list[Case]:
    """The runs of a config. The metric is positive where the model says the base's own value."""
    found: list[Case] = []
    per_kind: dict[str, int] = dict.fromkeys(config.kinds, 0)
    chosen = []
    for fact in facts(tuple(per_kind)):
        per_kind[fact.kind] += 1
        if per_kind[fact.kind] <= config.facts:
            chosen.append(fact)
    halves = np.random.default_rng([config.seed, 1]).permutation(len(chosen)) % 2
    for place, (fact, half) in enumerate(zip(chosen, halves.tolist(), strict=True)):
        own: Pair = pair(fact, tokenizer)
        for way in (0, 1) if config.ways == 2 else (place % 2,):
            base, donor = own.prompts[way], own.prompts[1 - way]
            metric = LogitDiff(own.answers[way], own.answers[1 - way])
            case = Case(len(found), fact.id, fact.kind, half, divided(base), divided(donor), own.suffix, metric)
            found.append(case)
    return found


def divided(prompt: Tokens) -> Tokens:
    """The prompt with the value and what stands around it in its turn as segments of their own."""
    value = prompt.part("value")

    def name(slot: int, segment: str) -> str:
        if segment != "fact":
            return segment
        return BEFORE if slot < value.start else VALUE if slot < value.stop else AFTER

    return replace(prompt, segments=tuple(name(slot, segment) for slot, segment in enumerate(prompt.segments)))


def segments_of(prompt: Tokens) -> tuple[list[str], list[str]]:
    """Segments that the value cannot have reached, and those that it can."""
    names = list(prompt.names)
    cut = names.index(VALUE)
    return names[:cut], names[cut:]


def collect(model: Model, cases: Sequence[Case], config: Config, run: Run) -> pd.DataFrame:
    """One row per run and cell; a run that the model cannot do has only the cells of whole segments.

    Columns: `grid`, those of `kvprobe.patching.pairs.table_of` (`cluster` is the fact), `kind`, `half`, `able` (the
    model says each run's own value), and for attribution `score` and `linear`.
    """
    return table_of_parts(run, cases, "maps", lambda case: measure(model, case, config), doing="Patching", unit="pair")


def measure(model: Model, case: Case, config: Config) -> pd.DataFrame:
    """All maps of one run."""
    base, donor = model.prefill(case.base), model.prefill(case.donor)
    _, reached = segments_of(case.base)
    tables = [
        _swept(model, case, WHOLE, base, donor, {"segment": case.base.names}),
        _swept(model, case, EVERYTHING, base, donor, {}),
        _swept(model, case, SAME, base, base, {}, parts=("KV",)),
    ]
    if able(tables[0]):
        tables.append(_swept(model, case, LAYERS, base, donor, {"layer": None, "segment": reached}))
        over = {"layer": None, "segment": reached, "head": None}
        found = attribute(model, base, donor, case.suffix, case.metric, over, check=config.check, seed=config.seed)
        tables.append(found.df().assign(grid=HEADS, base=found.base, donor=found.donor, way=found.donor - found.base))
        if config.step:
            over = {"layer": range(0, model.geometry.n_layers, config.step), "segment": [VALUE]}
            tables.append(_swept(model, case, RESIDUAL, base, donor, over, parts=("resid_pre",), reads="total"))
    return _labelled(pd.concat(tables, ignore_index=True), case, able(tables[0]))


def able(table: pd.DataFrame) -> bool:
    """Whether the model says each run's own value."""
    return bool((table["base"] > 0).all() and (table["donor"] < 0).all())


def collect_bands(model: Model, cases: Sequence[Case], table: pd.DataFrame, bands: Bands, run: Run) -> pd.DataFrame:
    """The table with each run's patches of the other half's bands, all slots at once, and of all other layers."""
    known = set(table.loc[table["able"], "pair"])
    todo = [case for case in cases if case.number in known]
    if not bands or not todo:
        return table
    more = table_of_parts(
        run, todo, "bands", lambda case: measure_bands(model, case, bands), doing="Patching bands", unit="pair"
    )
    return pd.concat([table, more], ignore_index=True)


def measure_bands(model: Model, case: Case, bands: Bands) -> pd.DataFrame:
    base, donor = model.prefill(case.base), model.prefill(case.donor)
    tables = []
    for part, by_half in bands.items():
        inside = by_half[1 - case.half]
        outside = [layer for layer in range(model.geometry.n_layers) if layer not in inside]
        for where, layers in (("inside", inside), ("outside", outside)):
            if layers:
                swept = _swept(model, case, BANDS, base, donor, {"band": [layers]}, parts=(part,))
                tables.append(swept.assign(where=where))
    return _labelled(pd.concat(tables, ignore_index=True), case, True)


def collect_example(model: Model, cases: Sequence[Case], table: pd.DataFrame, run: Run) -> pd.DataFrame | None:
    """The first run that the model can do, slot by slot from the value on; None if there is none."""
    known = set(table.loc[table["able"], "pair"])
    todo = [case for case in cases if case.number in known][:1]
    if not todo:
        return None
    return table_of_parts(
        run, todo, "example", lambda case: measure_slots(model, case), doing="Patching slots", unit="pair"
    )


def measure_slots(model: Model, case: Case) -> pd.DataFrame:
    base, donor = model.prefill(case.base), model.prefill(case.donor)
    start = case.base.span(VALUE).start
    # Two slots before the value are the light cone's control.
    slots = range(max(0, start - 2), len(case.base))
    scored = attribute(
        model, base, donor, case.suffix, case.metric, {"layer": None, "slot": slots}, check=32, seed=case.number
    )
    tables = [
        scored.df().assign(grid=SLOTS, base=scored.base, donor=scored.donor, way=scored.donor - scored.base),
        _swept(model, case, TOKENS, base, donor, {"slot": slots}),
        _swept(model, case, TOTAL, base, donor, {"slot": _said(case)}, parts=("KV",), reads="total"),
    ]
    found = pd.concat(tables, ignore_index=True)
    texts = {token: model.tokenizer.decode([token]) for token in set(found["token"].astype(int))}
    return _labelled(found.assign(text=[texts[int(token)] for token in found["token"]]), case, True)


def _said(case: Case) -> range:
    """The value and what follows it in its turn, whose tokens the prompt after them is read again for."""
    return range(case.base.span(VALUE).start, case.base.span(AFTER).stop)


def _swept(
    model: Model, case: Case, name: str, base: KVCache, donor: KVCache, over: Mapping[str, Any], **settings: Any
) -> pd.DataFrame:
    found = patch_sweep(model, base, donor, case.suffix, case.metric, over, progress=False, **settings)
    return table_of(found, case.number, case.fact).assign(grid=name)


def _labelled(table: pd.DataFrame, case: Case, able: bool) -> pd.DataFrame:
    return table.assign(pair=case.number, cluster=case.fact, kind=case.kind, half=case.half, able=able)
