"""From what was read, exchanged and closed to findings; each trace is a cluster."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Difference, Estimand, Mean, Ratio, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Finding, Findings
from kvprobe.stats import DIFFERENCE, POSITIVE, SHARE, Estimate
from kvprobe.studies.memento_toy import Config
from kvprobe.studies.memento_toy.closing import ERASED, OPEN, STAND_IN
from kvprobe.studies.memento_toy.collect import CHECKPOINT, MAIN, SEED, UNTRAINED
from kvprobe.studies.memento_toy.digits import RESTART, RETAINED
from kvprobe.studies.memento_toy.exchange import DONOR, OWN
from kvprobe.studies.memento_toy.probes import BOTH, LINEAR
from kvprobe.tasks.mementos import BASE, bayes_accuracy, block_name, draw_trace, hidden_blocks, visible_accuracy
from kvprobe.tidy import Rows, beside

PUBLISHED = (
    {"layer": 0, "distance": 1, "paper": 0.131},
    {"layer": 3, "distance": 1, "paper": 0.262},
    {"layer": 3, "distance": 2, "paper": 0.214},
    {"layer": 3, "distance": 7, "paper": 0.13},
)
"""Accuracy per digit from K and V of mementos, one to seven blocks after the block was hidden (arXiv 2604.09852)."""
TRAINING = Estimate(0.18, 0.17, 0.19), (0.77, 0.95)
"""The same over the training, which is published as a range, from one share of right mementos to another."""
ANSWER: dict[str, Any] = {"together": (), "family": "answer", "cluster": "trace"}
ROLES = (MAIN, SEED)


def conclude(tables: Mapping[str, Rows], config: Config, model: Model) -> Conclusion:
    layers = model.geometry.n_layers
    findings = findings_of(tables, config, layers)
    rng = np.random.default_rng([config.seed, 1])
    trace = draw_trace(rng, config.content, config.blocks)
    shown = replace(trace, blocks=trace.blocks[: config.hidden_from]).conversation()
    masked = tuple(map(block_name, hidden_blocks(config.hidden_from, config.keep)))
    design = (config.content, config.keep, config.blocks, config.block, layers)
    published = PUBLISHED if design == ("sum", 0, 10, 2, 4) else ()
    add_paper(findings, published)
    facts = {
        "chat": chat_record(shown, masked=masked),
        "layers": layers,
        "first": config.hidden_from,
        "last": config.blocks,
        "parameters": sum(parameter.numel() for parameter in model.lanes.plain.parameters()),
        "published": list(published),
    }
    return Conclusion(findings, [light_cone(tables["reach"], model)], facts)


def add_paper(findings: Findings, published: Sequence[Mapping[str, Any]]) -> None:
    """Add what the paper read, whose probe is not known, beside what each of ours did."""
    for cell, probe in product(published, findings.values("by_layer", "probe")):
        keys = {"model": MAIN, "probe": probe, "arm": RETAINED}
        if cell["layer"] == PUBLISHED[-1]["layer"]:
            findings.number("paper_by_distance", cell["paper"], **keys, distance=cell["distance"])
        if cell["distance"] == PUBLISHED[0]["distance"]:
            findings.number("paper_by_layer", cell["paper"], **keys, layer=cell["layer"])
    for accuracy in TRAINING[1] if published else ():
        findings.add(Finding("paper_by_training", {"accuracy": accuracy, "arm": RETAINED}, TRAINING[0]))


def findings_of(tables: Mapping[str, Rows], config: Config, layers: int) -> Findings:
    """All numbers of a run."""
    samples, answers, closing = tables["samples"], tables["answers"], tables["closing"]
    by_model = answers[answers["arm"] == RETAINED].groupby("model")["right"].mean().round(4)
    bounds = {
        distance: visible_accuracy(config.content, config.block, config.block + distance, config.keep)
        for distance in samples["distance"].unique().tolist()
    }
    samples = samples.assign(
        hidden=samples["right"] - samples["alike"],
        over=samples["right"] - samples["distance"].map(bounds),
        accuracy=samples["model"].map(by_model),
    )
    probed, written, ranks = (closing[closing["measure"] == name] for name in ("probe", "answer", "rank"))
    harm = written["right"] - beside(written, "right", {"state": OPEN}, ("trace", "memento"))
    site = {"distance": config.hidden_from - config.block, "layer": layers - 1, "part": BOTH, "probe": LINEAR}
    keys, where = ("model", "accuracy", "arm"), {**site, "role": (MAIN, CHECKPOINT, UNTRAINED)}
    over_training = Mean(name="by_training", of="right", by=keys, where=where, cluster="trace", within=SHARE)
    findings = measure(
        samples,
        of_samples(config, layers),
        (samples.sort_values("accuracy", kind="stable"), [over_training]),
        (answers[answers["memento"] >= config.hidden_from], OF_ANSWERS),
        (answers, (BY_MEMENTO,)),
        (ways(tables["changed"]), OF_CHANGED),
        (probed.assign(hidden=probed["right"] - probed["alike"]), OF_PROBED),
        (written.assign(harm=harm)[written["memento"] >= config.hidden_from], OF_CLOSED),
    )
    for state, layer, rank in ranks[["state", "layer", "rank"]].itertuples(index=False):
        findings.number("rank", rank, state=state, layer=int(layer))
    for distance, share in bounds.items():
        findings.number("text", share, distance=distance)
    alone = bayes_accuracy(config.block, [config.hidden_from]) if config.content == "sum" else 1 / BASE
    findings.number("own_text", alone)
    findings.number("visible_text", bounds[config.hidden_from - config.block])
    return findings


def of_samples(config: Config, layers: int) -> Iterator[Estimand]:
    """Of what probes read."""
    right = partial(Mean, of="right", cluster="trace", within=SHARE)
    beyond = partial(Mean, of="hidden", cluster="trace", within=DIFFERENCE)
    hidden = config.hidden_from - config.block
    shown, later = tuple(range(-1, hidden)), tuple(range(hidden, config.blocks))
    keys, last = ("model", "probe", "arm"), {"layer": layers - 1, "part": BOTH}
    here = {"distance": hidden, "part": BOTH}
    yield right(name="by_layer", by=(*keys, "layer"), where=here)
    yield right(name="by_distance", by=(*keys, "distance"), where={**last, "distance": later})
    yield right(name="shown", by=("model", "probe", "distance"), where={**last, "distance": shown})
    yield right(name="direct", by=("model", "probe", "layer"), where={"distance": 0, "part": BOTH})
    yield right(name="by_part", by=("model", "part", "arm", "layer"), where={"distance": hidden, "probe": LINEAR})
    linear = {"probe": LINEAR, "arm": RETAINED}
    far = {**linear, **last, "distance": later}
    yield beyond(name="hidden_by_layer", by=("model", "layer"), where={**linear, **here})
    yield beyond(name="hidden_by_distance", by=("model", "distance"), where=far)
    claimed = partial(Mean, by=("model",), where={**linear, **last, **here, "role": ROLES}, within=DIFFERENCE, **ANSWER)
    yield claimed(name="leak", of="hidden")
    yield claimed(name="beyond_text", of="over")
    if config.seeds:
        where = {**last, "distance": later, "role": ROLES}
        yield right(name="seeds", by=("probe", "arm", "distance"), where=where, cluster="model")
        yield beyond(name="seeds_hidden", by=("distance",), where={**far, "role": ROLES}, cluster="model")


BY_MEMENTO = Mean(name="by_memento", of="right", by=("model", "arm", "memento"), cluster="trace", within=SHARE)
OF_ANSWERS: tuple[Estimand, ...] = (
    Mean(name="right", of="right", by=("model", "arm"), cluster="trace", within=SHARE),
    Difference(
        name="kept",
        of="right",
        by=("model",),
        where={"arm": RETAINED, "role": ROLES},
        less={"arm": RESTART},
        within=DIFFERENCE,
        **ANSWER,
    ),
)
EXCHANGED = ("digits", "sum")
CHANGED = partial(Mean, by=("model", "condition", "part"), cluster="trace")
OF_CHANGED: tuple[Estimand, ...] = (
    CHANGED(name="after", of="right", where={"condition": (OWN, *EXCHANGED)}, within=SHARE),
    CHANGED(name="turned", of="turned", where={"condition": EXCHANGED}, within=SHARE),
    CHANGED(name="kl", of="kl", where={"condition": EXCHANGED}, within=POSITIVE, unit="nats"),
    CHANGED(name="margin", of="margin", where={"condition": (OWN, "sum", DONOR)}, unit="nats"),
    Mean(name="used", of="turned", by=("model",), where={"condition": "digits", "part": BOTH}, within=SHARE, **ANSWER),
    Ratio(name="way", of="moved", over="whole", by=("model", "part"), where={"condition": "sum"}, cluster="trace"),
    Ratio(
        name="follows",
        of="moved",
        over="whole",
        by=("model",),
        where={"condition": "sum", "part": BOTH},
        **ANSWER,
    ),
)
OF_PROBED: tuple[Estimand, ...] = (
    Mean(name="left", of="right", by=("state",), cluster="trace", within=SHARE),
    Mean(name="left_hidden", of="hidden", by=("state",), within=DIFFERENCE, **ANSWER),
)
OF_CLOSED: tuple[Estimand, ...] = (
    Mean(name="still", of="right", by=("state",), cluster="trace", within=SHARE),
    Mean(name="harm", of="harm", by=("state",), where={"state": (STAND_IN, *ERASED)}, within=DIFFERENCE, **ANSWER),
)


def ways(changed: Rows) -> Rows:
    """How far the margin between the two mementos moved (`moved`), of the way to where text and hidden block agree on
    the other one (`whole`)."""
    keys = ("model", "trace")
    own, donor = (beside(changed, "margin", {"condition": condition}, keys) for condition in (OWN, DONOR))
    return changed.assign(moved=own - changed["margin"], whole=own - donor)


def light_cone(reach: Rows, model: Model) -> Control:
    """The first two layers cannot know what is hidden."""
    near, far = (float(reach["varies"][here].max()) for here in (reach["layer"] < 2, reach["layer"] >= 2))
    return Control(
        "Light cone: in the first memento that is written while the block is hidden, K and V of the first two layers "
        f"are the same retained and computed again, to {near:.1e} of their size (allowed for round-off: "
        f"{model.round_off:.1e}); those of later layers differ by up to {far:.1e}.",
        near <= model.round_off,
    )
