"""Every component restored while the last words before an answer are read after a damaged cache.

Damage strikes what was said (the segments T1, fact and T2), not the system prompt, which holds the attention sink, nor
the question. In the family `false` nothing is broken: the cache is that of the same conversation with another fact. One
file per conversation and stage is kept, so an interrupted run resumes.
"""

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.attention import attend, contribution, lift
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.faults import Draws, Fault, Scope
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import prepare
from kvprobe.inference.trials import unrelated
from kvprobe.layers import layer_map, restored_together
from kvprobe.names import unknown
from kvprobe.patching.grid import even_bands
from kvprobe.studies.filter_poison import FALSE, Config
from kvprobe.studies.filter_poison.halves import NONE, heads_by_half
from kvprobe.tasks.facts import facts, halves, pair
from kvprobe.text.tokens import Tokens

STRUCK = ("T1", "fact", "T2")
"""Segments in which slots are damaged."""
STATE = "state"
"""Rows that hold the state of the residual stream, by layer; see `kvprobe.layers.states`."""
_SHARED = ("kind", "layer", "family", "prompt", "half")

LOOKS = ("mass", "lift", "contribution")
"""What a head does with the struck slots: attention on them, that over the clean run's, and what it reads there of what
its layer reads in all."""


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
    picked = [fact for kind in config.kinds for fact in facts((kind,))[: config.prompts]]
    cases = []
    for number, (fact, half) in enumerate(zip(picked, halves(picked, config.seed), strict=True)):
        both = pair(fact, model.tokenizer)
        way = number % 2
        whole, other = (both.prompts[at] + both.suffix for at in (way, 1 - way))
        cut = len(whole) - config.suffix
        cases.append(Case(number, fact.id, half, whole[:cut], other[:cut], whole[cut:]))
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
                table = table.merge(looks(model, case, clean, damaged), "left", on=["kind", "layer", "head"])
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


def looks(model: Model, case: Case, clean: KVCache, damaged: KVCache) -> pd.DataFrame:
    """One row per head: `LOOKS`, means over the suffix; see `kvprobe.attention`."""
    struck, queries = struck_of(clean, damaged), range(len(case.suffix))
    before, after = (attend(model, case.suffix, cache, queries=queries) for cache in (clean, damaged))
    table = lift(after, before, struck)[["layer", "head", "lift"]]
    mass, read = after.mass(slots=struck).mean(-1), contribution(model, after, struck).heads.mean(-1)
    table = table.assign(kind="head", mass=mass.flatten().cpu().numpy(), contribution=read.flatten().cpu().numpy())
    return table.astype({"layer": "Int64", "head": "Int64"})


def struck_of(clean: KVCache, damaged: KVCache) -> Int[Tensor, "struck"]:
    """Slots that hold another token, or where they all hold the same, another K or V."""
    differs = damaged.ledger.tokens[0] != clean.ledger.tokens[0]
    if not bool(differs.any()):
        pairs = zip((*damaged.keys, *damaged.values), (*clean.keys, *clean.values), strict=True)
        differs = torch.stack([(one != other)[0].any(-1).any(0) for one, other in pairs]).any(0)
    return differs.nonzero()[:, 0]


def damages(model: Model, config: Config, case: Case, control: bool = False) -> list[tuple[str, KVCache, KVCache]]:
    """For each family the clean cache and the damaged one."""
    clean = model.prefill(case.true)
    damaged = [(NONE, clean, clean)] if control else []
    for family, percent in config.rates.items():
        if family == FALSE:
            damaged.append((family, clean, model.prefill(case.false)))
            continue
        fault = fault_of(family, percent)
        donors = (
            {"distractor": model.prefill(unrelated(model.tokenizer, len(case.true), case.number))}
            if fault.lender == "distractor"
            else {}
        )
        context = prepare(model.lanes, clean, [fault], donors)
        draws = [Draws(seed=config.seed, sample=case.number)]
        damaged.append((family, clean, clean.corrupt(fault, draws=draws, contexts=[context])))
    return damaged


def fault_of(family: str, percent: float) -> Fault:
    """The fault of the robustness study under this name, striking so many slots of what was said."""
    named = CATALOGUE[family]
    scope = Scope(rate=percent / 100, segments=STRUCK, parts=named.parts, unit=named.unit("slot"))
    return named.make(scope=scope, at=0, transient=False)


def _labelled(table: pd.DataFrame, case: Case, family: str) -> pd.DataFrame:
    return table.assign(family=family, prompt=case.name, half=case.half)
