"""From maps to findings: which components may be called filter or poison, and whether heads with a high or low index on
some conversations have it on others."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

import numpy as np
import pandas as pd

from kvprobe.attention import LOOKS, attend
from kvprobe.cache.differences import changed_slots
from kvprobe.experiments.estimands import Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.layers import against_random, by_chance, index_correlation, verdicts
from kvprobe.layers.head_sets import ALL, CHOSEN, FILTER, MATCHED, POISON, RANDOM, HeadSets
from kvprobe.layers.verdicts import COMPONENT
from kvprobe.patching.metrics import LEAST
from kvprobe.report.document import AttentionView
from kvprobe.report.findings import Finding, Findings
from kvprobe.report.views.patterns import patterns_view
from kvprobe.stats import DIFFERENCE, Estimate, jackknife
from kvprobe.studies.filter_poison import Config
from kvprobe.studies.filter_poison.collect import NONE, STRUCK, damages, heads_by_half, pairs_of
from kvprobe.tidy import Rows, Where
from kvprobe.wording import few_clusters

KINDS = {"attn": "attention blocks", "mlp": "MLPs", "head": "heads"}
CLAIMS = len(KINDS) + 2
"""Of the answer: verdicts on three kinds of component, and two sets of heads tested. What decides them holds
together."""
STREAM = ("rho", "rho_after", "gain", "erasure", "erasure_attn", "erasure_mlp", "angle", "drop")
EXACT = 1e-3
"""How much of the damage may be left when everything is restored, and KL in nats where nothing is damaged."""
SHOWN = 4
"""Layers of the example."""

PROMPT: dict[str, Any] = {"over": "damage", "cluster": "prompt"}
DAMAGE = Mean(name="damage", of="damage", by=("family",), cluster="prompt", unit="nats")
NOISED = Ratio(name="noised", of="noised", by=("band", "family"), where={"kind": "band"}, **PROMPT)
OF_BLOCKS = {"by": ("kind", "layer", "family"), **PROMPT}
UNRELATED = Ratio(name="unrelated", of="gone", **OF_BLOCKS)
REACTION = Ratio(name="reaction", of="more_left", **OF_BLOCKS)
REMOVED = Ratio(name="removed", of="gone", by=("family", "sort", "heads"), **PROMPT)
EVERY: Where = {"family": ALL, "heads": CHOSEN}
BEYOND = Ratio(name="beyond", of="beyond", by=("sort",), where=EVERY, claims=CLAIMS, **PROMPT)
ONE: Where = {"single": True, "heads": CHOSEN}
BEYOND_ONE = Ratio(name="beyond_one", of="beyond", by=("family", "sort"), where=ONE, together=(), **PROMPT)


def conclude(tables: Mapping[str, pd.DataFrame], config: Config, model: Model) -> Conclusion:
    """Findings, controls and facts of a run, and the attention of an example."""
    conclusion = concluded(tables, config)
    views = [asdict(view_of(model, config, conclusion.findings))]
    return replace(conclusion, facts={**conclusion.facts, "views": views})


def concluded(tables: Mapping[str, Rows], config: Config) -> Conclusion:
    """What `conclude` gives, without the model and the example; see `collect` for the tables."""
    maps, by_half = tables["maps"], heads_by_half(tables["maps"], config)
    struck = maps[maps["family"] != NONE]
    once = struck.drop_duplicates(["family", "prompt"])
    findings = measure(struck, [DAMAGE, NOISED])
    for family, median in once.groupby("family", sort=False)["damage"].median().items():
        findings.number("median_damage", median, "nats", family=str(family))
    add_components(findings, struck, config)
    add_unrelated(findings, struck, tables["unrelated"])
    add_stream(findings, tables["states"])
    add_looks(findings, struck[struck["kind"] == "head"])
    add_tested(findings, tables["heads"], by_half)
    facts = {
        "prompts": int(maps["prompt"].nunique()),
        "layers": int(maps["layer"].max()) + 1,
        "top": len(by_half[0][POISON][0]),
        "segments": list(STRUCK),
        "views": [],
    }
    controls = list(controls_of(findings, maps))
    return Conclusion(findings, controls, facts, list(warnings_of(findings, facts["prompts"])))


def add_components(findings: Findings, struck: Rows, config: Config) -> None:
    """Of every component and band: π in each family, and the mean of the families, by verdict too; how many have each
    verdict, and how many would by chance."""
    table, prompts = verdicts(struck), struck["prompt"].nunique()
    for row in table.to_dict("records"):
        keys: dict[str, Any] = {
            str(key): int(row[key]) if key in ("layer", "head") else row[key] for key in COMPONENT if pd.notna(row[key])
        }
        for family in struck["family"].unique():
            mean, low, high, *widest = (row[f"{end}_{family}"] for end in ("pi", "low", "high", "smallest", "largest"))
            findings.add(Finding("pi", {**keys, "family": family}, Estimate(mean, low, high, prompts, *widest)))
        findings.number("index", row["pi"], **keys)
        findings.number("called", row["pi"], **keys, verdict=row["verdict"])
    for kind in KINDS:
        for verdict in (POISON, FILTER, "mixed", "neutral"):
            findings.number(
                "count", len(findings.where("called", kind=kind, verdict=verdict)), kind=kind, verdict=verdict
            )
    for row in by_chance(struck[struck["kind"] != "band"], seed=config.seed, comparisons=CLAIMS).to_dict("records"):
        for statistic in ("mean", "high"):
            findings.number("chance", row[statistic], kind=row["kind"], statistic=statistic)


def add_unrelated(findings: Findings, struck: Rows, table: Rows) -> None:
    """The index of each block with the output of another conversation's clean run, as a share of the damage; and by how
    much more damage its own clean output leaves. A filter reacts to *this* damage only if its own leaves more."""
    own = struck.rename(columns={"restored": "own"})[["kind", "layer", "family", "prompt", "own"]]
    rows = table.astype({"layer": "Int64"}).merge(own, on=["kind", "layer", "family", "prompt"])
    rows = rows.assign(gone=rows["damage"] - rows["restored"], more_left=rows["own"] - rows["restored"])
    findings.extend(measure(rows, [UNRELATED, REACTION]))


def add_stream(findings: Findings, states: Rows) -> None:
    """Medians over conversations, because a ratio of small numbers has wild means; and rank correlations over layers of
    what is measured without damage with the mean index of attention and of MLPs."""
    medians = states.groupby(["family", "layer"], sort=False)[list(STREAM)].median()
    for (family, layer), row in medians.drop(NONE).iterrows():
        for of, value in row.items():
            # Before the second layer there is hardly a deviation to be erased, and its share is any number.
            drawn = of == "rho" or (of in ("erasure_attn", "erasure_mlp") and layer > 1)
            findings.number("stream" if drawn else "stream_also", value, measure=of, family=family, layer=int(layer))
    for kind in ("attn", "mlp"):
        index = pd.Series({finding.keys["layer"]: finding.value.mean for finding in findings.where("index", kind=kind)})
        for of in ("angle", "drop"):
            rho = index.rank().corr(medians.loc[NONE][of].rank())
            findings.number("baseline", float(rho), measure=of, kind=kind)


def add_looks(findings: Findings, heads: Rows) -> None:
    """Rank correlations over heads of what they do with struck slots with their index, and the same within layers; none
    where all heads are alike."""
    for name, within_layers in (("look", False), ("look_within", True)):
        draws = {
            (look, str(family)): index_correlation(of_family, look, within_layers=within_layers)
            for family, of_family in heads.groupby("family", sort=False)
            for look in LOOKS
        }
        known = {place: rhos for place, rhos in draws.items() if isfinite(rhos[0])}
        together = len(known) if within_layers else 0
        for (look, family), rhos in known.items():
            value = jackknife(float(rhos[0]), rhos[1:], DIFFERENCE, max(1, together))
            findings.add(Finding(name, {"look": look, "family": family}, value, comparisons=together))


def add_tested(findings: Findings, table: Rows, by_half: Mapping[int, HeadSets]) -> None:
    """The index of each set on the half that it was not found on, that of random heads, and the difference; how many
    random sets go as far; which heads both halves chose, and how many random ones are of the chosen."""
    rows = against_random(table)
    rows["single"] = rows["family"] != ALL
    findings.extend(measure(rows, [REMOVED, BEYOND, BEYOND_ONE]))
    for (family, sort), draws in rows[rows["heads"] == RANDOM].groupby(["family", "sort"], sort=False):
        keys, sums = {"family": family, "sort": sort}, draws.groupby("draw")[["gone", "damage"]].sum()
        further = sums["gone"] / sums["damage"] - findings.at("removed", **keys, heads=CHOSEN).mean
        findings.number("as_far", int((further >= 0 if sort == POISON else further <= 0).sum()), **keys)
        findings.number("sets", len(sums), **keys)
    for sort in (POISON, FILTER):
        twice = set.intersection(*({*sets[sort][0]} for sets in by_half.values()))
        taken = [
            head in {*sets[POISON][0], *sets[FILTER][0]}
            for sets in by_half.values()
            for group in sets[sort + MATCHED]
            for head in group
        ]
        findings.number("overlap", len(twice), sort=sort)
        findings.number("shared", float(np.mean(taken)), sort=sort)


def controls_of(findings: Findings, maps: Rows) -> Iterator[Control]:
    """Whether no damage gives none, and everything restored leaves none."""
    nothing = maps.loc[maps["family"] == NONE, ["damage", "restored", "noised"]]
    whole = maps[(maps["kind"] == "band") & (maps["family"] != NONE)].groupby(["prompt", "family"]).tail(1)
    whole = whole[whole["damage"] >= LEAST]
    for of, largest, said in (
        (
            "undamaged",
            nothing.abs().max().max(),
            "With the clean cache in place of the damaged one, blocks and bands restored or not, KL in nats is at most",
        ),
        (
            "everything",
            (whole["restored"] / whole["damage"]).abs().max(),
            "With all outputs of all layers restored, the share of the damage that is left is at most",
        ),
    ):
        findings.number("left", largest, of=of)
        yield Control(f"{said} {largest:.1e} (allowed: {EXACT:g}).", bool(largest <= EXACT))


def warnings_of(findings: Findings, prompts: int) -> Iterator[str]:
    yield from few_clusters(prompts, "conversations")
    for kind, name in KINDS.items():
        count = sum(findings.at("count", kind=kind, verdict=verdict).mean for verdict in (POISON, FILTER))
        mean, high = (findings.at("chance", kind=kind, statistic=statistic).mean for statistic in ("mean", "high"))
        if 0 < count <= high:
            yield (
                f"{count:.0f} of the {name} have a verdict, where chance gives {mean:.1f} on average and may give "
                f"{high:.0f}: they may be chance."
            )


def view_of(model: Model, config: Config, findings: Findings) -> AttentionView:
    """One conversation read with its cache whole and damaged, in the layers whose heads matter most, index beside each
    head."""
    index, pair = findings.heads("index", SHOWN, kind="head"), pairs_of(config, model)[0]
    _, clean, damaged = damages(model, config, pair)[0]
    queries = range(len(pair.suffix))
    before, after = (
        attend(model, pair.suffix, cache, queries=queries, layers=list(index.index)) for cache in (clean, damaged)
    )
    return patterns_view(
        before,
        after,
        caption=f"Conversation {pair.id} as it was read, and with the first kind of damage, its slots marked.",
        damaged=changed_slots(clean, damaged).tolist(),
        index=index.to_numpy(float),
        index_name="causal index π, mean of families",
    )
