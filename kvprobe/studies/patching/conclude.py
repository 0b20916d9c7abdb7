"""From maps to findings: how much K and V carry, where, in which layers, and what the controls say."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Estimand, Ratio, Total, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.patching.pairs import agreements
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.studies.patching import Config
from kvprobe.studies.patching.bands import FEWEST, SHARE, band_of, bands_by_half, profile
from kvprobe.studies.patching.collect import VALUE, Grid
from kvprobe.tasks.facts import conversation, facts
from kvprobe.tidy import Rows, Where, beside, chosen
from kvprobe.wording import few_clusters

SLACK = 1e-4
"""How far a control may be off, as a share of the largest logit difference."""
CONTROLS = {
    "light cone": "K and V before the value cannot depend on it, so that swapping them does nothing",
    "same": "swapping K and V of every layer and slot for the run's own does nothing",
    "donor": "swapping K and V of every layer and slot for the donor's gives the donor's value",
}


def way(name: str, where: Where, *by: str, of: str = "effect", over: str = "way", **more: Any) -> Ratio:
    """A share of the way from the base to the donor: the mean effect over the mean way, with intervals over facts."""
    return Ratio(name=name, of=of, over=over, by=by, where=where, cluster="cluster", unit="of the way", **more)


HEADLINE: Mapping[str, Any] = {"together": (), "family": "headline"}
"""Of what K carries, what V carries, and which carries more."""
ESTIMANDS: tuple[Estimand, ...] = (
    way("everything", {"grid": Grid.EVERYTHING, "part": ("K", "V")}, "part", **HEADLINE),
    way("difference", {"grid": Grid.EVERYTHING, "part": "V"}, of="more_than_keys", **HEADLINE),
    way("both", {"grid": Grid.EVERYTHING, "part": "KV"}),
    way("interaction", {"grid": Grid.EVERYTHING, "part": "KV"}, of="more_than_sum", together=()),
    way("segment", {"grid": Grid.WHOLE}, "segment", "part"),
    way("kind", {"grid": Grid.EVERYTHING}, "kind", "part"),
    way("layer", {"grid": (Grid.LAYERS, Grid.RESIDUAL)}, "layer", "segment", "part"),
    way("head", {"grid": Grid.HEADS, "segment": VALUE}, "layer", "head", "part", of="score"),
    way("band", {"grid": Grid.BANDS}, "part", "where"),
    way("of_whole", {"grid": Grid.BANDS, "where": "inside"}, "part", over="whole"),
)
"""K and V of all slots and layers; of a segment; by kind of fact; of a layer; of a KV head; of a band of layers and of
the layers beside it; of a band, as a share of what all layers do."""


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    table, example, n_layers = tables["samples"], tables.get("example"), model.geometry.n_layers
    known = table[table["able"]]
    enough = known["cluster"].nunique() >= FEWEST
    findings = measure(prepared(known), ESTIMANDS) if enough else Findings()
    runs = table.drop_duplicates("pair").assign(runs=1)
    findings.extend(measure(runs, (Total(name=of, of=of, by=("kind",)) for of in ("runs", "able"))))
    findings.number("facts", runs["cluster"].nunique())
    findings.number("able_facts", known["cluster"].nunique())
    fact = facts(config.kinds)[0]
    chat = chat_record(conversation(fact, fact.values[0]), marked=fact.values[0], only_in=("fact", "question"))
    shown: dict[str, Any] = {"enough": enough, "fewest": FEWEST, "share": SHARE, "layers": n_layers}
    shown |= {"chat": chat, "example": None}
    if enough:
        add_bands(findings, known, n_layers)
        add_agreement(findings, known)
        if example is not None:
            first = example.drop_duplicates("slot").sort_values("slot")
            shown["example"] = {"fact": str(first["cluster"].iloc[0]), "texts": first["text"].tolist()}
            add_example(findings, example.sort_values("slot", kind="stable"))
    few = few_clusters(int(known["cluster"].nunique()), "facts") if enough else []
    return Conclusion(findings, list(controls_of(findings, table)), shown, few)


def prepared(known: Rows) -> Rows:
    """The runs that the model can do, with what K, V and both of all slots and layers do beside each cell."""
    whole = {
        part: beside(known, "effect", {"grid": Grid.EVERYTHING, "part": part}, ("pair",)) for part in ("K", "V", "KV")
    }
    return known.assign(
        more_than_keys=whole["V"] - whole["K"],
        more_than_sum=whole["KV"] - whole["K"] - whole["V"],
        whole=beside(known, "effect", {"grid": Grid.EVERYTHING}, ("pair", "part")),
        **{name: known[name].fillna(-1).astype(int) for name in ("layer", "head")},
    )


def add_bands(findings: Findings, known: Rows, n_layers: int) -> None:
    """First and last layer of each band, of all facts and of each half, and what single layers add up to; nothing for
    a part without bands."""
    cells = chosen(known, {"grid": Grid.LAYERS})
    for part, by_half in bands_by_half(cells, n_layers).items():
        effects = profile(cells, part, n_layers)
        everywhere = band_of(effects)
        if everywhere is None:
            continue
        halves = {f"half {place}": band for place, band in enumerate(by_half.values(), 1)}
        for found_on, band in {"all": everywhere, **halves}.items():
            for end, layer in (("first", band.start), ("last", band.stop - 1)):
                findings.number("band_layer", layer, part=part, found_on=found_on, end=end)
        for layers, sum_of in (("all", effects), ("band", effects[everywhere.start : everywhere.stop])):
            findings.number("summed", float(sum_of.sum()), "of the way", part=part, layers=layers)


def add_agreement(findings: Findings, known: Rows) -> None:
    """Rank correlation of each first-order score with exact patching within a run: quartiles over runs."""
    cells = known[(known["grid"] == Grid.HEADS) & known["effect"].notna()]
    findings.number("checked", len(cells), "cells")
    for score in ("score", "linear"):
        for part, of_part in cells.groupby("part", sort=False):
            correlations = agreements(of_part, score)
            quartiles = np.percentile(correlations, [25, 50, 75]).tolist() if correlations else [None] * 3
            for quartile, value in zip(("low", "median", "high"), quartiles, strict=True):
                findings.number("agreement", value, score=score, part=str(part), quartile=quartile)


def add_example(findings: Findings, example: Rows) -> None:
    """The share of the way of each cell of the example, by token: layer by layer, and with all layers at once."""
    for row in example.itertuples():
        token = f"{int(row.slot)} {row.text.replace(chr(10), '↵').strip() or '·'}"
        if row.grid == Grid.SLOTS:
            layer, share = int(row.layer), row.score / row.way
            findings.number("slot", share, "of the way", layer=layer, token=token, part=str(row.part))
        else:
            reads = "total" if row.grid == Grid.TOTAL else "reader"
            findings.number("token", row.effect / row.way, "of the way", seen=f"{reads}: {row.part}", token=token)


def controls_of(findings: Findings, table: Rows) -> Iterator[Control]:
    """Departures from what must hold exactly; over all runs, also those that the model cannot do."""
    whole = table[table["grid"] == Grid.WHOLE]
    names = list(dict.fromkeys(whole["segment"]))
    early = whole[whole["segment"].isin(names[: names.index(VALUE)])]
    swapped = chosen(table, {"grid": Grid.EVERYTHING, "part": "KV"})
    largest = float(chosen(table, {"grid": (Grid.WHOLE, Grid.EVERYTHING)})["value"].abs().max())
    findings.number("largest", largest, "logits")
    departures = early["effect"], chosen(table, {"grid": Grid.SAME})["effect"], swapped["value"] - swapped["donor"]
    allowed = SLACK * max(1.0, largest)
    for (name, claim), departure in zip(CONTROLS.items(), departures, strict=True):
        off = float(departure.abs().max())
        findings.number("off", off, "logits", control=name)
        seen = f"{name.capitalize()}: {claim}. Off by at most {off:.1e} logits (allowed: {allowed:.1e})."
        yield Control(seen, off <= allowed)
