"""Every component restored while the last words before an answer are read after a damaged cache.

Damage strikes what was said (the segments T1, fact and T2), not the system prompt, which holds the attention sink, nor
the question. In the family `false` nothing is broken: the cache is that of the same conversation with another fact. One
file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvprobe.attention import LOOKS, looks
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import changed_slots
from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.faults import Fault, Scope
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.inference.trials import struck
from kvprobe.layers import Component, head_sets, layer_map, restored_sets, restored_together
from kvprobe.layers.head_sets import HeadSets
from kvprobe.layers.suffix import BLOCKS
from kvprobe.names import unknown
from kvprobe.patching.grid import even_bands
from kvprobe.studies.filter_poison import FALSE, Config
from kvprobe.tasks.facts import FactPair, facts, pairs_in_turn
from kvprobe.tidy import Rows

NONE = "none"
"""The control: the clean cache in the place of the damaged one."""
STRUCK = ("T1", "fact", "T2")
"""Segments in which slots are damaged."""
STATE = "state"
"""Rows that hold the state of the residual stream, by layer; see `kvprobe.layers.states`."""
_SHARED = ("kind", "layer", "family", "prompt", "half")


def pairs_of(config: Config, model: Model) -> list[FactPair]:
    """The conversations of a config, of which the first of each pair is true, up to the last tokens before the answer.

    Raises:
        UserError: a family is no fault that there is.
    """
    for family in config.rates:
        if family not in (*CATALOGUE, FALSE):
            raise UserError(unknown("fault", family, (*CATALOGUE, FALSE)))
    pairs = pairs_in_turn(facts(config.kinds, config.prompts), model.tokenizer, config.seed)
    return [pair.ending(config.suffix) for pair in pairs]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Four tables: `maps`, one row per conversation, family and component (see `LayerMap.df`), and control; the
    `states` of its layers; `unrelated`, blocks whose output is that of another conversation's clean run, as a control;
    and `heads`, sets of heads found on the other half, each restored together.
    """
    pairs, unit = pairs_of(config, model), "conversation"
    parts = Parts(model, config, run)
    table = parts.table(restored, pairs, "map", doing="Restoring components", unit=unit)
    of_states = [name for name in table if name not in ("head", "band", "damage", "restored", "noised", "pi", *LOOKS)]
    of_maps = [name for name in table if name not in of_states or name in _SHARED]
    maps, states = table.loc[table["kind"] != STATE, of_maps], table.loc[table["kind"] == STATE, of_states]
    by_half = heads_by_half(maps, config)
    others = list(zip(pairs, pairs[len(pairs) // 2 :] + pairs[: len(pairs) // 2], strict=True))
    doing = "Exchanging blocks with another conversation's"
    return {
        "maps": maps,
        "states": states,
        "unrelated": parts.table(unrelated, others, "unrelated", doing=doing, unit=unit),
        "heads": parts.table(together, pairs, "heads", by_half, doing="Restoring sets of heads", unit=unit),
    }


def restored(model: Model, config: Config, pair: FactPair) -> pd.DataFrame:
    """The map of each family and of the control, and the states of the residual stream."""
    tables = []
    for family, clean, damaged in damages(model, config, pair, control=True):
        layers = model.geometry.n_layers
        components = layer_map(
            model, clean, damaged, pair.suffix, kept=config.suffix, heads=family != NONE,
            bands=[*even_bands(layers), range(layers)], progress=False,
        )  # fmt: skip
        table = components.df()
        if family != NONE:
            seen = looks(model, pair.suffix, clean, damaged, changed_slots(clean, damaged)).assign(kind="head")
            seen = seen.astype({"layer": "Int64", "head": "Int64"})
            table = table.merge(seen, "left", on=["kind", "layer", "head"])
        table = pd.concat([table, components.states.assign(kind=STATE)], ignore_index=True)
        tables.append(table.assign(family=family))
    return pd.concat(tables, ignore_index=True).assign(prompt=pair.id, half=pair.half)


def unrelated(model: Model, config: Config, case: tuple[FactPair, FactPair]) -> pd.DataFrame:
    """The first conversation with each block's output replaced by that of the other's clean run."""
    pair, other = case
    source = model.prefill(other.prompts[0]), other.suffix
    blocks = [Component(kind, layer) for kind in BLOCKS for layer in range(model.geometry.n_layers)]
    rows = pd.DataFrame([{"kind": block.kind, "layer": block.layer} for block in blocks])
    groups, tables = [[block] for block in blocks], []
    for family, clean, damaged in damages(model, config, pair):
        damage, left = restored_together(model, clean, damaged, pair.suffix, groups, kept=config.suffix, source=source)
        tables.append(rows.assign(family=family, damage=damage, restored=left))
    return pd.concat(tables, ignore_index=True).assign(prompt=pair.id)


def together(model: Model, config: Config, pair: FactPair, by_half: Mapping[int, HeadSets]) -> pd.DataFrame:
    """The sets of heads that were found on the other half, each restored together."""
    sets = by_half[1 - pair.half]
    tables = [
        restored_sets(model, clean, damaged, pair.suffix, sets, kept=config.suffix).assign(family=family)
        for family, clean, damaged in damages(model, config, pair)
    ]
    return pd.concat(tables, ignore_index=True).assign(prompt=pair.id, half=pair.half)


def heads_by_half(maps: Rows, config: Config) -> dict[int, HeadSets]:
    """The heads to be restored together that were found on each half."""
    return {
        int(half): head_sets(of_half, config.top, config.random, np.random.default_rng([config.seed, 2, int(half)]))
        for half, of_half in maps[maps["family"] != NONE].groupby("half")
    }


def damages(model: Model, config: Config, pair: FactPair, control: bool = False) -> list[tuple[str, KVCache, KVCache]]:
    """For each family the clean cache and the damaged one."""
    true, false = pair.prompts
    clean = model.prefill(true)
    damaged = [(NONE, clean, clean)] if control else []
    for family, percent in config.rates.items():
        if family == FALSE:
            other = model.prefill(false)
        else:
            other = struck(model, clean, fault_of(family, percent), seed=config.seed, number=pair.number)
        damaged.append((family, clean, other))
    return damaged


def fault_of(family: str, percent: float) -> Fault:
    """The fault of the robustness study under this name, striking so many slots of what was said."""
    named = CATALOGUE[family]
    scope = Scope(rate=percent / 100, segments=STRUCK, parts=named.parts, unit=named.unit("slot"))
    return named.make(scope=scope, at=0, transient=False)
