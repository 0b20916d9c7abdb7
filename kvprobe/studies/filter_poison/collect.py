"""Every component restored while the last words before an answer are read after a damaged cache.

Damage strikes what was said (the segments T1, fact and T2), not the system prompt, which holds the attention sink, nor
the question. In the family `false` nothing is broken: the cache is that of the same conversation with another fact. One
file per conversation and stage is kept, so an interrupted run resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvprobe.attention import LOOKS, looks
from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import changed_slots
from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.faults import Fault, Scope
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.inference.trials import struck
from kvprobe.layers import Component, layer_map, random_heads, ranked_heads, restored_together
from kvprobe.names import unknown
from kvprobe.patching.grid import even_bands
from kvprobe.studies.filter_poison import FALSE, Config
from kvprobe.tasks.facts import facts, halves, pairs_in_turn
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import Rows

NONE = "none"
"""The control: the clean cache in the place of the damaged one."""
POISON, FILTER = "poison", "filter"
MATCHED = " (random)"
"""Added to the name of a set of heads: others of the same layers."""

Heads = Mapping[str, Sequence[Sequence[Component]]]
"""Sets of heads to be restored together, by the name of what they are."""

STRUCK = ("T1", "fact", "T2")
"""Segments in which slots are damaged."""
STATE = "state"
"""Rows that hold the state of the residual stream, by layer; see `kvprobe.layers.states`."""
_SHARED = ("kind", "layer", "family", "prompt", "half")


@dataclass(frozen=True)
class Case:
    """A conversation up to the last tokens before its answer.

    Attributes:
        half: heads that were found on the conversations of one half are tested on those of the other.
        true, false: what is cached, with the one fact and with the other.
        suffix: what is read after it.
    """

    number: int
    name: str
    half: int
    true: Tokens
    false: Tokens
    suffix: Tokens


def cases_of(config: Config, model: Model) -> list[Case]:
    """The conversations of a config.

    Raises:
        UserError: a family is no fault that there is.
    """
    for family in config.rates:
        if family not in (*CATALOGUE, FALSE):
            raise UserError(unknown("fault", family, (*CATALOGUE, FALSE)))
    pairs = pairs_in_turn(facts(config.kinds, config.prompts), model.tokenizer)
    cases = []
    for number, (pair, half) in enumerate(zip(pairs, halves(pairs, config.seed), strict=True)):
        whole, other = (prompt + pair.suffix for prompt in pair.prompts)
        cut = len(whole) - config.suffix
        cases.append(Case(number, pair.id, half, whole[:cut], other[:cut], whole[cut:]))
    return cases


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Three tables: `maps`, one row per conversation, family and component (see `LayerMap.df`), and control; the
    `states` of its layers; and `heads`, sets of heads found on the other half, each restored together.
    """
    cases = cases_of(config, model)

    def restored(case: Case) -> pd.DataFrame:
        tables = []
        for family, clean, damaged in damages(model, config, case, control=True):
            layers = model.geometry.n_layers
            components = layer_map(
                model, clean, damaged, case.suffix, kept=config.suffix, heads=family != NONE,
                bands=[*even_bands(layers), range(layers)], progress=False,
            )  # fmt: skip
            table = components.df()
            if family != NONE:
                table = table.merge(looked(model, case, clean, damaged), "left", on=["kind", "layer", "head"])
            table = pd.concat([table, components.states.assign(kind=STATE)], ignore_index=True)
            tables.append(_labelled(table, case, family))
        return pd.concat(tables, ignore_index=True)

    def together(case: Case) -> pd.DataFrame:
        sets = by_half[1 - case.half]
        labels = [(sort, draw) for sort, groups in sets.items() for draw in range(len(groups))]
        groups = [group for of_sort in sets.values() for group in of_sort]
        tables = []
        for family, clean, damaged in damages(model, config, case):
            damage, left = restored_together(model, clean, damaged, case.suffix, groups, kept=config.suffix)
            table = pd.DataFrame(labels, columns=["sort", "draw"]).assign(damage=damage, restored=left)
            tables.append(_labelled(table, case, family))
        return pd.concat(tables, ignore_index=True)

    table = table_of_parts(run, cases, "map", restored, doing="Restoring components", unit="conversation")
    of_states = [name for name in table if name not in ("head", "band", "damage", "restored", "noised", "pi", *LOOKS)]
    of_maps = [name for name in table if name not in of_states or name in _SHARED]
    maps, states = table.loc[table["kind"] != STATE, of_maps], table.loc[table["kind"] == STATE, of_states]
    by_half = heads_by_half(maps, config)
    heads = table_of_parts(run, cases, "heads", together, doing="Restoring sets of heads", unit="conversation")
    return {"maps": maps, "states": states, "heads": heads}


def heads_by_half(maps: Rows, config: Config) -> dict[int, Heads]:
    """The heads with the highest and the lowest mean index on each half, and random heads of the same layers."""
    by_half: dict[int, Heads] = {}
    for half, of_half in maps[maps["family"] != NONE].groupby("half"):
        ranked = ranked_heads(of_half)
        top = min(config.top, len(ranked) // 2)
        rng = np.random.default_rng([config.seed, 2, int(half)])
        sets: dict[str, list[list[Component]]] = {}
        chosen = {POISON: ranked[-top:], FILTER: ranked[:top]}
        avoided = {*ranked[-top:], *ranked[:top]}
        for name, heads in chosen.items():
            sets[name] = [heads]
            sets[name + MATCHED] = [random_heads(heads, ranked, avoided, rng) for _ in range(config.random)]
        by_half[int(half)] = sets
    return by_half


def looked(model: Model, case: Case, clean: KVCache, damaged: KVCache) -> pd.DataFrame:
    """What each head does with the struck slots, to be merged with its row of a map."""
    table = looks(model, case.suffix, clean, damaged, changed_slots(clean, damaged))
    return table.assign(kind="head").astype({"layer": "Int64", "head": "Int64"})


def damages(model: Model, config: Config, case: Case, control: bool = False) -> list[tuple[str, KVCache, KVCache]]:
    """For each family the clean cache and the damaged one."""
    clean = model.prefill(case.true)
    damaged = [(NONE, clean, clean)] if control else []
    for family, percent in config.rates.items():
        if family == FALSE:
            other = model.prefill(case.false)
        else:
            fault = fault_of(family, percent)
            other = struck(model, clean, case.true, fault, seed=config.seed, number=case.number)
        damaged.append((family, clean, other))
    return damaged


def fault_of(family: str, percent: float) -> Fault:
    """The fault of the robustness study under this name, striking so many slots of what was said."""
    named = CATALOGUE[family]
    scope = Scope(rate=percent / 100, segments=STRUCK, parts=named.parts, unit=named.unit("slot"))
    return named.make(scope=scope, at=0, transient=False)


def _labelled(table: pd.DataFrame, case: Case, family: str) -> pd.DataFrame:
    return table.assign(family=family, prompt=case.name, half=case.half)
